"""What the forward and the backward kernel share: sizes and layouts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memcomp_kernels.pallas_tpu import activations, blocks

Pair = tuple[Any, ...]
"""Of the key memory and the value memory."""

# Flags of a chunk.
RESETS, CONTINUES, LAST = 1, 2, 4


@dataclasses.dataclass(frozen=True)
class Unit:
  """Heads side by side on lanes, in one chunk.

  Attributes:
    heads: of a unit.
    tokens: of a chunk, a power of two.
    slots: of a memory.
    key_dim: width of keys.
    value_dim: width of values.
  """

  heads: int
  tokens: int
  slots: int
  key_dim: int
  value_dim: int

  @property
  def dims(self) -> tuple[int, int]:
    """Columns of one head's key memory and value memory."""
    return self.key_dim, self.value_dim

  @property
  def widths(self) -> tuple[int, int]:
    """Lanes of a unit's key memory and value memory."""
    return self.heads * self.key_dim, self.heads * self.value_dim

  @property
  def lanes(self) -> int:
    """Lanes of what is kept by slot."""
    return self.heads * self.tokens


@dataclasses.dataclass(frozen=True)
class Plan:
  """A kernel, but for the shapes of its operands.

  Attributes:
    unit: its sizes.
    units: of a grid step.
    chunks: of a grid step.
    group: units emitted in lock step.
    skew: stages between two groups.
    phi: the write's activation.
    phi_eps: of it; None where rows bring it.
    read: the activation between the passes.
    read_eps: of it.
    safe: decay by differences of logs, for any range; else separable.
    first_order: no gradient through z.
    shared: both passes have the same gates.
    join: sums of products as products of concatenations.
    rows: of the batch in a grid step.
    token: gradients per token (`_substitution`), not at the chunk's start; a
      chunk is then a tile of any length.
    lane_heads: of a unit that share lanes in `_substitution`.
  """

  unit: Unit
  units: int
  chunks: int
  group: int
  skew: int
  phi: str
  phi_eps: float | None
  read: str
  read_eps: float
  safe: bool
  first_order: bool
  shared: bool
  join: bool
  rows: int = 1
  token: bool = False
  lane_heads: int = 1

  @property
  def row_names(self) -> tuple[str, ...]:
    """Rows of a chunk's gates, `[rows, heads * tokens]` in float32.

    Cumulative log decay, write rate and the last token's cumulative log decay,
    a pass each unless shared; phi's eps; then unused ones up to whole tiles.
    With gradients per token, rate and eps are rows by lane, and instead of the
    rate stands the cumulative log decay before the token's own.
    """
    passes = "0" if self.shared else "01"
    second = "prev" if self.token else "rate"
    names = [f"{row}{p}" for row in ("log", second, "end") for p in passes]
    if self.phi_eps is None and not self.token:
      names.append("eps")
    size = 4 if len(names) <= 4 else 8
    return (*names, *(f"unused{i}" for i in range(size - len(names))))

  @property
  def lane_row_names(self) -> tuple[str, ...]:
    """Rows by lane, `[tokens, 128]` for each group of heads; both passes."""
    eps = ("eps",) if self.phi_eps is None else ()
    return ("log", "prev", "rate", *eps)

  @property
  def step_units(self) -> int:
    """Units of all rows of a grid step."""
    return self.rows * self.units

  def place(self, g: int) -> tuple[int, int]:
    """The row and the unit in it of a grid step's unit `g`."""
    return divmod(g, self.units)

  @property
  def lane_groups(self) -> int:
    """Groups of a unit's heads, each with its own lanes."""
    return self.unit.heads // self.lane_heads

  @property
  def lane_rows(self) -> int:
    """Lanes of a head in a group: passes and units, and what is left."""
    return blocks.LANES // self.lane_heads

  def lane_row(self, p: int, g: int) -> int:
    """Where pass `p` of a unit stands among them."""
    return p * self.step_units + g

  @property
  def square(self) -> bool:
    """Whether memories are as wide as what is kept by slot."""
    return self.unit.widths == (self.unit.lanes,) * 2


def sum_slots(x: jax.Array) -> jax.Array:
  """The sum over slots, `[1, lanes]`."""
  return jnp.sum(x, axis=0, keepdims=True)


def direction(plan: Plan, half, target, eps, rate):
  """The direction, and its pullback to (half, target, rate, eps or None)."""

  def direction(half, target, rate, eps):
    if plan.first_order:
      half = lax.stop_gradient(half)
    return activations.direction(plan.phi, half, target, eps, rate)

  if plan.phi_eps is None:
    return jax.vjp(direction, half, target, rate, eps)
  fixed = functools.partial(direction, eps=eps)
  u, pull = jax.vjp(fixed, half, target, rate)
  return u, lambda d: (*pull(d), None)


def tokens_of(plan: Plan, s: int, g: int, width: int):
  """The index of a chunk and unit in a block by token."""
  tokens = plan.unit.tokens
  row, u = plan.place(g)
  return row, pl.ds(s * tokens, tokens), pl.ds(u * width, width)


def load(refs: Any, plan: Plan, s: int, g: int):
  """Query, key and value by token, and the target.

  The target is prepared and by slot; with gradients per token it is as it
  came, by token.
  """
  unit = plan.unit
  keys, values = unit.widths
  if plan.token:
    target = refs.target[tokens_of(plan, s, g, unit.heads * unit.slots)]
  else:
    target = load_target(refs.target, plan, s, g)
  return (
    refs.query[tokens_of(plan, s, g, keys)],
    refs.key[tokens_of(plan, s, g, keys)],
    refs.value[tokens_of(plan, s, g, values)],
    target,
  )


def load_target(ref: jax.Ref, plan: Plan, s: int, g: int) -> jax.Array:
  """The target of a chunk and unit by slot, float32 `[slots, lanes]`."""
  unit = plan.unit
  rows = unit.heads * unit.slots
  block = ref[0, pl.ds(g * rows, rows), :]
  lanes = slice(s * unit.tokens, (s + 1) * unit.tokens)
  target = blocks.side_by_side(block, unit.heads, lanes)
  return activations.prepare_target(plan.phi, target.astype(jnp.float32))


def store_target(
  ref: jax.Ref, plan: Plan, s: int, g: int, d_prepared: jax.Array
) -> None:
  """Writes the adjoint of a chunk's targets; `d_prepared` is by slot."""
  unit = plan.unit
  # Preparing is a projection, its own adjoint.
  d = activations.prepare_target(plan.phi, d_prepared).astype(ref.dtype)
  for h in range(unit.heads):
    rows = pl.ds((g * unit.heads + h) * unit.slots, unit.slots)
    lanes = pl.ds(s * unit.tokens, unit.tokens)
    ref[0, rows, lanes] = d[:, h * unit.tokens : (h + 1) * unit.tokens]


def store(ref: jax.Ref, plan: Plan, s: int, g: int, x: jax.Array) -> None:
  """Writes an array by token; its width says which."""
  ref[tokens_of(plan, s, g, x.shape[1])] = x.astype(ref.dtype)
