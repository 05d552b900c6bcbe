"""What the forward and the backward kernel share: sizes, rows, one write.

Pairs of rows and heads are on lanes (`mosaic.pairs`), slots on sublanes; the
columns of a memory are `[slots, rows, lanes]`. A token's write is

  s_t = keep s_{t-1} + write h - along s'

with scalars a slot; `along` is of the stale meaning alone, where s' is the
column at the chunk's start; per token what stands along a column is in `keep`
(`writes`). The base of a token is the memory that its gradient is taken at: s'
or s_{t-1}.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memcomp_kernels.lattice import columns, reference
from memcomp_kernels.lattice.per_token import writes
from memcomp_kernels.pallas_tpu import pairs

# Rows of a token's gates, `[ROWS, lanes]` in float32; the rest are unused.
DECAY, RATE, TAKEN, ROWS = 0, 1, 2, 8

# Rows of a tile's flags, `[FLAGS, lanes]` in float32; the rest are unused.
RESETS, CONTINUES, LAST, COMPLETE, FLAGS = 0, 1, 2, 3, 8


@dataclasses.dataclass(frozen=True)
class Plan:
  """A kernel, but for the shapes of its operands.

  Attributes:
    spec: the memory's meaning.
    lanes: how pairs lie.
    rows: value dimensions of a lane.
    tokens: of a tile: the chunk where that is meaning.
    flagged: whether tiles come with flags.
  """

  spec: reference.Spec
  lanes: pairs.Lanes
  rows: int
  tokens: int
  flagged: bool

  @property
  def slots(self) -> int:
    """Columns of a memory."""
    return self.spec.num_slots

  @property
  def memory(self) -> tuple[int, int, int]:
    """The shape of a block's memory."""
    return self.slots, self.rows, pairs.LANES

  @property
  def by_slot(self) -> tuple[int, int]:
    """The shape of a number a slot."""
    return self.slots, pairs.LANES

  def groups(self) -> list[range]:
    """Slots whose sums over rows fill a register."""
    size = pairs.SUBLANES
    return [range(i, i + size) for i in range(0, self.slots, size)]


class Gates(NamedTuple):
  """Of one token, `[1, lanes]` each."""

  decay: jax.Array
  rate: jax.Array
  taken: jax.Array


class Write(NamedTuple):
  """Of one token, `[slots, lanes]` each; `along` is None per token."""

  keep: jax.Array
  write: jax.Array
  along: Any


def gates(rows: jax.Array) -> Gates:
  """From a token's rows."""
  return Gates(*(rows[i : i + 1] for i in (DECAY, RATE, TAKEN)))


def code(spec: reference.Spec, key: jax.Array, squares: jax.Array) -> jax.Array:
  """What the base is multiplied with to give Phi k."""
  return writes.over_norm(key, squares, spec)


def find(
  spec: reference.Spec,
  share: jax.Array,
  length: jax.Array,
  before: writes.Columns,
  key: jax.Array,
  gates: Gates,
) -> tuple[Write, writes.Columns]:
  """Returns a token's write, and the columns after it.

  Args:
    spec: the memory's meaning.
    share: the base's columns times h, `[slots, lanes]`.
    length: |h|^2, `[1, lanes]`.
    before: the base's columns.
    key: `[slots, lanes]`.
    gates: of the token.
  """
  if not spec.stale:
    unread: Any = None
    token = writes.Tokens(unread, key, unread, *gates)
    keep, write, after = writes.factors(share, length, before, token, spec)
    return Write(keep, write, None), after
  # As `tile` has it.
  share = writes.over_norm(share, before.squares, spec)
  c = share - key if spec.objective == "encoding" else key
  write = writes.over_norm(-gates.rate * c, before.squares, spec)
  keep = jnp.broadcast_to(gates.decay, write.shape)
  if spec.update == "delta":
    return Write(keep, write, jnp.zeros_like(write)), before
  if spec.unit_columns:
    tangent = length - (2 - before.squares) * share * share
    squares = write * write * jnp.maximum(tangent, 0)
    beta = columns.contraction(gates.decay, squares)
    keep, write = beta * keep, beta * write
  along = writes.over_norm(write * share, before.squares, spec)
  return Write(keep, write, along), before


def row(rows: jax.Ref, kind: int, slot: int) -> jax.Array:
  """One slot's number of a kind, `[1, lanes]`, to be spread over rows.

  Read by itself, as a load spreads it for nothing.
  """
  return rows[kind, pl.ds(slot, 1), :]


def dots(plan: Plan, memory: jax.Ref, x: Any) -> jax.Array:
  """Sums over rows of columns times `x`, of a part.

  Args:
    plan: the kernel.
    memory: `[slots, rows, lanes]`.
    x: `[rows, lanes]`, or another memory.

  Returns:
    `[slots, lanes]`, to be summed over parts.
  """
  found = [
    pairs.sum_rows(
      [pairs.folded(memory[m] * (x if x.ndim == 2 else x[m])) for m in group]
    )
    for group in plan.groups()
  ]
  return jnp.concatenate(found, axis=0)


def combine(plan: Plan, memory: jax.Ref, rows: jax.Ref, kind: int) -> jax.Array:
  """The sum of columns, each times its row: `[rows, lanes]`."""
  return functools.reduce(
    operator.add,
    (memory[m] * row(rows, kind, m) for m in range(plan.slots)),
  )
