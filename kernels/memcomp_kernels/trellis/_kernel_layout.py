"""What the forward and the backward kernel share: sizes, layouts, gates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memcomp_kernels.primitives.mosaic import blocks, columns

Pair = tuple[Any, Any]
"""Of the key memory and the value memory."""

# Flags of a chunk.
RESETS, CONTINUES, LAST = 1, 2, 4

# Rows of a chunk's gates, float32 `[ROWS or 2 * ROWS, heads * tokens]`.
LOG_DECAY, RATE, EPS = (0, 1), (2, 3), 4
ROWS = 4


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

  @property
  def num_rows(self) -> int:
    """Rows of gates."""
    return ROWS if self.phi_eps is not None else 2 * ROWS


@dataclasses.dataclass(frozen=True)
class Gates:
  """The gates of one chunk and unit, for both passes.

  Attributes:
    plan: the kernel.
    log_decay: cumulative, `[1, lanes]`, a pass.
    write_rate: `[1, lanes]`, a pass.
    eps: of phi.
    mu: exp(log_decay).
    inverse: what the scaled U has more than its write rate: 1 / mu if
      separable, None if safe.
    total: mu of the last token, `[1, width]`, a pass.
    to_end: `[1, lanes]`, a pass, what the update multiplies U with; None if
      separable, where it is `total` of the whole.
  """

  plan: Plan
  log_decay: Pair
  write_rate: Pair
  eps: Any
  mu: Pair
  inverse: Pair | None
  total: Pair
  to_end: Pair | None

  @property
  def rate(self) -> Pair:
    """What U is scaled with."""
    if self.inverse is None:
      return self.write_rate
    first, second = self.write_rate
    return first * self.inverse[0], second * self.inverse[1]

  def weigh(self, p: int, scores: jax.Array, causal: jax.Array) -> jax.Array:
    """Scores `[tokens, lanes]` with the decay between their tokens."""
    if not self.plan.safe:
      return jnp.where(causal, scores, 0.0)
    return scores * self.between(p, causal)

  def weigh_transposed(
    self, p: int, scores: jax.Array, anticausal: jax.Array
  ) -> jax.Array:
    """As `weigh`, of scores whose rows are the written tokens."""
    if not self.plan.safe:
      return jnp.where(anticausal, scores, 0.0)
    unit, row = self.plan.unit, self.log_decay[p]
    column = blocks.spread(blocks.as_column(row), unit.heads, unit.tokens)
    return scores * jnp.exp(jnp.where(anticausal, row - column, -jnp.inf))

  def between(self, p: int, causal: jax.Array) -> jax.Array:
    """Omega `[tokens, lanes]`: mask before exp."""
    unit, row = self.plan.unit, self.log_decay[p]
    column = blocks.spread(blocks.as_column(row), unit.heads, unit.tokens)
    return jnp.exp(jnp.where(causal, column - row, -jnp.inf))

  def read(self, start: jax.Array, written: jax.Array) -> jax.Array:
    """Pass 1's reads, halved: of the start memory, and of what was written."""
    if self.plan.safe:
      return self.mu[0] * start - written
    return self.mu[0] * (start - written)

  @property
  def code_scale(self) -> jax.Array:
    """Doubles the code, as memories are halved."""
    if self.plan.safe:
      return jnp.full_like(self.mu[1], 2.0)
    return 2.0 * self.mu[1]

  def output(self, start: jax.Array) -> jax.Array:
    """Pass 2's read of the start memory `[tokens, width]`, decayed."""
    if not self.plan.safe:
      return start
    unit = self.plan.unit
    column = blocks.as_column(self.mu[1])
    return start * blocks.spread(column, unit.heads, unit.value_dim)

  def advance(
    self, p: int, memory: jax.Array, u: jax.Array, written: jax.Array
  ) -> jax.Array:
    """The memory after the chunk; `written` is block diagonal."""
    if self.to_end is not None:
      u = u * self.to_end[p]
      update = blocks.nn(u.astype(written.dtype), written)
      return self.total[p] * memory - update
    update = blocks.nn(u.astype(written.dtype), written)
    return self.total[p] * (memory - update)

  def row_adjoints(
    self, d_read: Pair, d_rate: Pair, d_eps: Pair, d_kept: Pair, d_update: Pair
  ) -> jax.Array:
    """The adjoint of the rows.

    Args:
      d_read: sums over slots of reads times their adjoints, `[1, lanes]`.
      d_rate: of the scaled rates, `[1, lanes]`.
      d_eps: of eps, `[1, lanes]`; not read unless rows bring it.
      d_kept: sums over slots of the memory before the chunk times the decayed
        adjoint of that after it, `[1, width]`.
      d_update: sums over slots of U times what it sees of that adjoint,
        `[1, lanes]`.
    """
    unit, plan = self.plan.unit, self.plan
    lane = blocks.lane_in_head(unit.lanes, unit.heads)
    log_decay, rate = [], []
    for p in (0, 1):
      ends = blocks.sum_of_heads(d_kept[p], unit.heads, unit.tokens)
      ends -= blocks.sum_of_heads(d_update[p], unit.heads, unit.tokens)
      d = d_read[p] - d_rate[p] * self.rate[p]
      log_decay.append(d + jnp.where(lane == unit.tokens - 1, ends, 0.0))
      inverse = 1.0 if self.inverse is None else self.inverse[p]
      rate.append(d_rate[p] * inverse)
    rows = log_decay + rate
    if plan.phi_eps is None:
      none = jnp.zeros_like(rows[0])
      rows = [*rows, d_eps[0] + d_eps[1]] + [none] * (plan.num_rows - 5)
    return jnp.concatenate(rows, 0)


def gates(rows: jax.Array, plan: Plan) -> Gates:
  """The gates of a chunk from its rows."""
  unit = plan.unit

  def row(i):
    return rows[i : i + 1]

  def pair(function):
    return function(0), function(1)

  log_decay = pair(lambda p: row(LOG_DECAY[p]))
  ends = pair(
    lambda p: blocks.last_of_heads(log_decay[p], unit.heads, unit.dims[p])
  )
  to_end = None
  if plan.safe:

    def after(p):
      last = blocks.last_of_heads(log_decay[p], unit.heads, unit.tokens)
      return jnp.exp(last - log_decay[p])

    to_end = pair(after)
  return Gates(
    plan=plan,
    log_decay=log_decay,
    write_rate=pair(lambda p: row(RATE[p])),
    eps=row(EPS) if plan.phi_eps is None else plan.phi_eps,
    mu=pair(lambda p: jnp.exp(log_decay[p])),
    inverse=None if plan.safe else pair(lambda p: jnp.exp(-log_decay[p])),
    total=pair(lambda p: jnp.exp(ends[p])),
    to_end=to_end,
  )


def tokens_of(plan: Plan, s: int, g: int, width: int):
  """The index of a chunk and unit in a block by token."""
  tokens = plan.unit.tokens
  return 0, pl.ds(s * tokens, tokens), pl.ds(g * width, width)


def load(refs: Any, plan: Plan, s: int, g: int):
  """Query, key and value by token, and the prepared target by slot."""
  unit = plan.unit
  keys, values = unit.widths
  return (
    refs.query[tokens_of(plan, s, g, keys)],
    refs.key[tokens_of(plan, s, g, keys)],
    refs.value[tokens_of(plan, s, g, values)],
    load_target(refs.target, plan, s, g),
  )


def load_target(ref: jax.Ref, plan: Plan, s: int, g: int) -> jax.Array:
  """The target of a chunk and unit by slot, float32 `[slots, lanes]`."""
  unit = plan.unit
  rows = unit.heads * unit.slots
  block = ref[0, pl.ds(g * rows, rows), :]
  lanes = slice(s * unit.tokens, (s + 1) * unit.tokens)
  target = blocks.side_by_side(block, unit.heads, lanes)
  return columns.prepare_target(plan.phi, target.astype(jnp.float32))


def store_target(
  ref: jax.Ref, plan: Plan, s: int, g: int, d_prepared: jax.Array
) -> None:
  """Writes the adjoint of a chunk's targets; `d_prepared` is by slot."""
  unit = plan.unit
  # Preparing is a projection, its own adjoint.
  d = columns.prepare_target(plan.phi, d_prepared).astype(ref.dtype)
  for h in range(unit.heads):
    rows = pl.ds((g * unit.heads + h) * unit.slots, unit.slots)
    lanes = pl.ds(s * unit.tokens, unit.tokens)
    ref[0, rows, lanes] = d[:, h * unit.tokens : (h + 1) * unit.tokens]


def store(ref: jax.Ref, plan: Plan, s: int, g: int, x: jax.Array) -> None:
  """Writes an array by token; its width says which."""
  ref[tokens_of(plan, s, g, x.shape[1])] = x.astype(ref.dtype)
