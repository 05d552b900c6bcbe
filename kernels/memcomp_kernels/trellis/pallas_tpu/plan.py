"""Sizes and layouts that the forward and the backward kernel share."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memcomp_kernels.pallas_tpu import LANES, activations
from memcomp_kernels.trellis import reference

_TOKEN_TILE = 32  # tokens per tile, unless heads fill lanes otherwise

Pair = tuple[Any, ...]
"""One item for the key memory (pass 1), one for the value memory (pass 2)."""


@dataclasses.dataclass(frozen=True)
class UnitSizes:
  """Heads side by side on lanes, in one chunk.

  Attributes:
    heads: Heads per unit.
    tokens: Tokens per chunk, a power of two.
    slots: Slots per memory.
    key_dim: Width of keys.
    value_dim: Width of values.
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
    """Lanes of arrays by slot."""
    return self.heads * self.tokens


def unit(
  spec: reference.Spec,
  heads: int,
  key_dim: int,
  value_dim: int,
  tile: int | None = None,
) -> UnitSizes:
  """Returns a unit: the number of heads side by side that fill 128 lanes.

  The number divides the heads.

  Args:
    spec: the memory's options.
    heads: heads per row.
    key_dim: width of keys.
    value_dim: width of values.
    tile: preferred tokens per tile with gradients per token; None for the
      default.

  Raises:
    NotImplementedError: no number of heads fits; the message says why.
  """
  if reason := unsupported(spec, heads, key_dim, value_dim):
    raise NotImplementedError(f"trellis mosaic_tpu: {reason}")
  if spec.chunked:
    tokens = spec.chunk_size
    together = _heads(spec, heads, key_dim, value_dim)
  else:
    together = _token_heads(heads, key_dim, value_dim, tile)
    tokens = LANES // together
  return UnitSizes(
    heads=together,
    tokens=tokens,
    slots=spec.num_slots,
    key_dim=key_dim,
    value_dim=value_dim,
  )


def _heads(spec, heads, key_dim, value_dim) -> int:
  """Returns the heads of a unit; 0 if no number fits."""
  wanted = max(LANES // min(key_dim, value_dim, spec.chunk_size), 1)
  fitting = [n for n in _fitting(heads, key_dim, value_dim) if n <= wanted]
  return max(fitting, default=0)


def _token_heads(heads, key_dim, value_dim, tile) -> int:
  """Returns the heads of a unit with gradients per token; tiles fill lanes."""
  wanted = LANES / (tile or _TOKEN_TILE)
  fitting = [n for n in _fitting(heads, key_dim, value_dim) if n > 1]
  return min(fitting, key=lambda n: abs(n - wanted), default=0)


def _fitting(heads, key_dim, value_dim) -> list[int]:
  """Returns numbers of heads whose keys and values fill lanes."""
  return [
    n
    for n in (1, 2, 4, 8)
    if heads % n == 0
    and (n * key_dim) % LANES == 0
    and (n * value_dim) % LANES == 0
  ]


def unsupported(
  spec: reference.Spec, heads: int, key_dim: int, value_dim: int
) -> str | None:
  """Says why no layout exists for these sizes, or returns None."""
  chunk = spec.chunk_size
  if spec.chunked and (chunk < 16 or chunk & (chunk - 1)):
    return f"chunk_size={chunk} must be a power of two of at least 16"
  if spec.num_slots % 16:
    return f"num_slots={spec.num_slots} must be a multiple of 16"
  for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
    if dim < 16 or dim & (dim - 1):
      return f"{name}={dim} must be a power of two of at least 16"
  least = LANES // min(key_dim, value_dim)
  if spec.chunked:
    together = _heads(spec, heads, key_dim, value_dim)
  else:
    together = _token_heads(heads, key_dim, value_dim, None)
    least = max(least, 2)
  if not together:
    if not spec.chunked:
      return (
        f"heads={heads} must be a multiple of {least}: gradients per token take"
        f" two heads or more together, which must fill {LANES} lanes"
      )
    return (
      f"heads={heads} must be a multiple of {least}, so that heads of key_dim="
      f"{key_dim} and value_dim={value_dim} fill {LANES} lanes"
    )
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A kernel's sizes and options, without the shapes of its operands.

  Its two kinds differ in where gradients of writes are taken: `ChunkStartPlan`
  and `PerTokenPlan`.

  Attributes:
    unit: Sizes of a unit.
    units: Units of one row per grid step.
    chunks: Chunks per grid step.
    group: Units emitted in lock step.
    skew: Stages between the starts of two groups.
    phi: Activation of the write.
    phi_eps: Epsilon of phi; None if the rows contain it.
    read: Activation between the passes.
    read_eps: Epsilon of `read`.
    safe: Whether decay is computed from differences of logs, which works for
      any range. Otherwise the decay is separable.
    first_order: Whether no gradient flows through z.
    shared: Whether both passes have the same gates.
    join: Whether to fuse sums of matmuls into one matmul of concatenations.
    rows: Rows of the batch per grid step.
  """

  unit: UnitSizes
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

  @property
  def row_names(self) -> tuple[str, ...]:
    """Names of the rows of a chunk's gates, float32 `[rows, heads * tokens]`.

    The rows are the cumulative log decay, the second row of the kind of plan,
    and the last token's cumulative log decay: one each per pass, or one for
    both if shared. Then come further rows of the kind of plan, and unused rows
    up to whole registers.
    """
    passes = "0" if self.shared else "01"
    names = ("log", self._second_row, "end")
    rows = [f"{name}{p}" for name in names for p in passes] + self._more_rows
    size = 4 if len(rows) <= 4 else 8
    return (*rows, *(f"unused{i}" for i in range(size - len(rows))))

  @property
  def _second_row(self) -> str:
    raise NotImplementedError

  @property
  def _more_rows(self) -> list[str]:
    return []

  @property
  def step_units(self) -> int:
    """Number of units of all rows of a grid step."""
    return self.rows * self.units

  def place(self, g: int) -> tuple[int, int]:
    """Returns the row of a grid step's unit `g`, and the unit's index in it."""
    return divmod(g, self.units)

  @property
  def square(self) -> bool:
    """Whether memories are as wide as arrays by slot."""
    return self.unit.widths == (self.unit.lanes,) * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkStartPlan(Plan):
  """Gradients of all writes of a chunk are taken at its start.

  The second row is the write rate; a further row is phi's eps.
  """

  @property
  def _second_row(self) -> str:
    return "rate"

  @property
  def _more_rows(self) -> list[str]:
    return ["eps"] if self.phi_eps is None else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerTokenPlan(Plan):
  """The gradient of each write is taken at the memory before its token.

  A chunk is then a tile of any length. The second row is the cumulative log
  decay before the token's own. Rates and eps are rows by lane.
  """

  @property
  def _second_row(self) -> str:
    return "prev"

  @property
  def lane_row_names(self) -> tuple[str, ...]:
    """Names of rows by lane, `[tokens, 128]`; each holds both passes."""
    eps = ("eps",) if self.phi_eps is None else ()
    return ("log", "prev", "rate", *eps)

  @property
  def lane_rows(self) -> int:
    """Lanes per head: passes and units, then unused lanes."""
    return LANES // self.unit.heads

  def lane_row(self, p: int, g: int) -> int:
    """Returns the lane of pass `p` of unit `g` among a head's lanes."""
    return p * self.step_units + g


def sum_slots(x: jax.Array) -> jax.Array:
  """Sums over slots, to `[1, lanes]`."""
  return jnp.sum(x, axis=0, keepdims=True)


def direction(plan: Plan, half, target, eps, rate):
  """Returns the direction and its pullback to (half, target, rate, eps).

  The pullback returns None for eps if eps is fixed.
  """

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
  """Returns the index of a chunk and unit in a block by token."""
  tokens = plan.unit.tokens
  row, u = plan.place(g)
  return row, pl.ds(s * tokens, tokens), pl.ds(u * width, width)


def load(refs: Any, plan: Plan, s: int, g: int):
  """Loads query, key and value by token."""
  keys, values = plan.unit.widths
  return (
    refs.query[tokens_of(plan, s, g, keys)],
    refs.key[tokens_of(plan, s, g, keys)],
    refs.value[tokens_of(plan, s, g, values)],
  )


def store(ref: jax.Ref, plan: Plan, s: int, g: int, x: jax.Array) -> None:
  """Stores an array by token, whose width says which memory it belongs to."""
  ref[tokens_of(plan, s, g, x.shape[1])] = x.astype(ref.dtype)
