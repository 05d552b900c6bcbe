"""Sizes, rows and a token's write, which both kernels share.

Pairs of rows and heads are on lanes (`pallas_tpu.pairs`), slots on sublanes.
The columns of a memory are `[slots, rows, lanes]`. A token's write is

  s_t = keep s_{t-1} + write h - along s'

with one scalar each per slot. Only gradients at the chunk's start have `along`,
where s' is the column at the chunk's start. With gradients per token, `keep`
includes the component along a column (see `writes`). The base of a token is the
memory at which its gradient is taken: s' or s_{t-1}.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memcomp_kernels.lattice import reference
from memcomp_kernels.lattice.per_token import writes
from memcomp_kernels.pallas_tpu import LANES, SUBLANES, pairs

# Rows of a token's gates, float32 `[ROWS, lanes]`. The other rows are unused.
DECAY, RATE, TAKEN, ROWS = 0, 1, 2, 8

# Rows of a tile's flags, float32 `[FLAGS, lanes]`. The other rows are unused.
RESETS, CONTINUES, LAST, COMPLETE, FLAGS = 0, 1, 2, 3, 8


# Maximum value dimensions per lane: what a pass keeps of them in registers.
_ROWS = 64


def layouts(num_pairs: int, value_dim: int) -> list[pairs.Lanes]:
  """Returns the possible layouts of pairs on lanes, fastest first.

  A pair is one head of one row. The order is an estimate: a pair should have as
  few parts as fill the lanes, because work per slot is repeated in each part.

  Args:
    num_pairs: rows of the batch times heads.
    value_dim: a multiple of 8.
  """

  def cost(lanes):
    rows = value_dim / lanes.parts
    # Passes over the memory, then work per token and slot, in dimensions.
    return rows > _ROWS, lanes.blocks * (rows + 8), lanes.parts

  choices = [
    pairs.Lanes(num_pairs, parts)
    for parts in (1, 2, 4, 8, 16)
    if value_dim % (parts * SUBLANES) == 0
  ]
  return sorted(choices, key=cost)


@dataclasses.dataclass(frozen=True)
class Plan:
  """A kernel's sizes and options, without the shapes of its operands.

  Attributes:
    spec: Options that define the memory.
    lanes: Layout of pairs on lanes.
    rows: Value dimensions per lane.
    tokens: Tokens per tile. If the definition depends on chunks, a tile is a
      chunk.
    flagged: Whether tiles have flags.
  """

  spec: reference.Spec
  lanes: pairs.Lanes
  rows: int
  tokens: int
  flagged: bool

  @property
  def slots(self) -> int:
    """Number of columns of a memory."""
    return self.spec.num_slots

  @property
  def memory(self) -> tuple[int, int, int]:
    """Shape of a block's memory."""
    return self.slots, self.rows, LANES

  @property
  def by_slot(self) -> tuple[int, int]:
    """Shape of an array with one number per slot."""
    return self.slots, LANES

  def groups(self) -> list[range]:
    """Returns groups of slots whose sums over rows fill a register."""
    starts = range(0, self.slots, SUBLANES)
    return [range(i, i + SUBLANES) for i in starts]


class TokenGates(NamedTuple):
  """Gates of one token, `[1, lanes]` each; `taken` is 1 for valid tokens."""

  decay: jax.Array
  rate: jax.Array
  taken: jax.Array


class Write(NamedTuple):
  """Write of one token, `[slots, lanes]` each; `along` is None per token."""

  keep: jax.Array
  write: jax.Array
  along: Any


def gates(rows: jax.Array) -> TokenGates:
  """Returns the gates from a token's rows."""
  return TokenGates(*(rows[i : i + 1] for i in (DECAY, RATE, TAKEN)))


def find(
  spec: reference.Spec,
  share: jax.Array,
  length: jax.Array,
  before: writes.Columns,
  key: jax.Array,
  gates: TokenGates,
) -> tuple[Write, writes.Columns]:
  """Returns a token's write, and the columns after it.

  Args:
    spec: Options that define the memory.
    share: Products of the base's columns with h, `[slots, lanes]`.
    length: |h|^2, `[1, lanes]`.
    before: The base's columns.
    key: Key of the token, `[slots, lanes]`.
    gates: Gates of the token.
  """
  if not spec.chunked:
    unread: Any = None
    token = writes.TokenInputs(unread, key, unread, *gates)
    keep, write, after = writes.factors(share, length, before, token, spec)
    return Write(keep, write, None), after
  # The same algebra as in `lattice.tile`.
  share = writes.over_norm(share, before.squares, spec)
  c = share - key if spec.objective == "encoding" else key
  write = writes.over_norm(-gates.rate * c, before.squares, spec)
  keep = jnp.broadcast_to(gates.decay, write.shape)
  if spec.update == "delta":
    return Write(keep, write, jnp.zeros_like(write)), before
  if spec.unit_columns:
    tangent = length - (2 - before.squares) * share * share
    squares = write * write * jnp.maximum(tangent, 0)
    beta = reference.contraction(gates.decay, squares)
    keep, write = beta * keep, beta * write
  along = writes.over_norm(write * share, before.squares, spec)
  return Write(keep, write, along), before


def row(rows: jax.Ref, kind: int, slot: int) -> jax.Array:
  """Loads one slot's number of a kind, `[1, lanes]`, to spread over rows.

  Each row is a load of its own, because a load spreads it at no cost.
  """
  return rows[kind, pl.ds(slot, 1), :]


def dots(plan: Plan, memory: jax.Ref, x: Any) -> jax.Array:
  """Sums columns times `x` over the rows of a part.

  Args:
    plan: Plan of the kernel.
    memory: Columns, `[slots, rows, lanes]`.
    x: `[rows, lanes]`, or another memory.

  Returns:
    `[slots, lanes]`; the caller sums it over parts.
  """
  found = [
    pairs.sum_rows(
      [pairs.folded(memory[m] * (x if x.ndim == 2 else x[m])) for m in group]
    )
    for group in plan.groups()
  ]
  return jnp.concatenate(found, axis=0)


def combine(plan: Plan, memory: jax.Ref, rows: jax.Ref, kind: int) -> jax.Array:
  """Sums columns, each multiplied by its row's number: `[rows, lanes]`."""
  return functools.reduce(
    operator.add,
    (memory[m] * row(rows, kind, m) for m in range(plan.slots)),
  )
