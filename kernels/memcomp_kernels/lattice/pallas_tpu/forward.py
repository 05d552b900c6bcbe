"""Lattice forward on a TPU: token by token, with the memory in VMEM.

A token takes three passes over its memory. The first computes h from the base,
and the second computes h's products with each column. The third does the write,
the read and the update of the memory together. Per token, the kernel computes
the definition without approximation, with one difference. It divides columns by
the length that they must have, and normalises them exactly at the end of a
tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memcomp_kernels.lattice import reference
from memcomp_kernels.lattice.pallas_tpu import plan as plan_lib
from memcomp_kernels.lattice.per_token import writes
from memcomp_kernels.pallas_tpu import pairs


class Refs(NamedTuple):
  """Blocks of one step, which is a tile; see `pallas_tpu.pairs` for shapes.

  Attributes:
    query: Queries, `[1, tokens, slots, lanes]`.
    key: Keys, `[1, tokens, slots, lanes]`.
    value: Values, `[1, tokens, rows, lanes]`.
    gates: Gates, `[1, tokens, plan_lib.ROWS, lanes]`.
    flags: Flags, `[1, 1, plan_lib.FLAGS, lanes]`; None if all tiles are full
      and belong to one segment.
    memory: Memory before the first token, `[1, slots, rows, lanes]`.
    reset: Memory that a segment starts from; None without flags.
    start: Memory at the start of a chunk that an earlier call has begun; None
      without flags or chunks.
    output: Outputs, shaped as `value`.
    final: The memory, carried from tile to tile.
    last: The start of the last chunk; None without flags or chunks.
    saved: Memory before the tile, `[1, 1, slots, rows, lanes]`; None if not
      wanted.
    base: The chunk's start, scratch; None without chunks. All scratch is
      float32.
    rows: A token's numbers by slot, `[KINDS, slots, lanes]`, scratch.
    squares: Squared lengths of the base's columns, `[slots, lanes]`, scratch.
    untouched: See `writes.Columns`; `[slots, lanes]`, scratch.
  """

  query: jax.Ref
  key: jax.Ref
  value: jax.Ref
  gates: jax.Ref
  flags: Any
  memory: jax.Ref
  reset: Any
  start: Any
  output: jax.Ref
  final: jax.Ref
  last: Any
  saved: Any
  base: Any
  rows: jax.Ref
  squares: jax.Ref
  untouched: jax.Ref


# Indices in `Refs.rows`.
CODE, QUERY, KEEP, WRITE, ALONG, D_SHARE, KINDS = 0, 1, 2, 3, 4, 5, 6


def begin(refs: Any, plan: plan_lib.Plan, memory: jax.Ref) -> None:
  """Resets `memory`, and computes the base of a tile and its columns."""
  if plan.flagged:
    resets = flag(refs, plan_lib.RESETS)
    continues = flag(refs, plan_lib.CONTINUES)
    for m in range(plan.slots):
      column = jnp.where(resets, refs.reset[0, m], memory[m])
      memory[m] = column
      if refs.base is not None:
        refs.base[m] = jnp.where(continues, refs.start[0, m], column)
  base = memory if refs.base is None else refs.base
  refs.squares[...] = squares(plan, base)
  refs.untouched[...] = jnp.ones(plan.by_slot, jnp.float32)


def flag(refs: Any, row: int) -> jax.Array:
  """Returns one of a tile's flags, bool `[1, lanes]`."""
  return refs.flags[0, 0, pl.ds(row, 1), :] > 0


def squares(plan: plan_lib.Plan, memory: jax.Ref) -> jax.Array:
  """Returns the squared lengths of a memory's columns, `[slots, lanes]`."""
  return pairs.all_parts(plan_lib.dots(plan, memory, memory), plan.lanes.parts)


def token(
  refs: Any, plan: plan_lib.Plan, t: jax.Array, base: jax.Ref
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes a token's write into `refs.rows`, and the columns after it.

  Args:
    refs: References of the kernel.
    plan: Plan of the kernel.
    t: Index of the token in the tile.
    base: Memory at which the token's gradient is taken.

  Returns:
    h `[rows, lanes]`, its products with the columns `[slots, lanes]`, and its
    squared length `[1, lanes]`.
  """
  spec = plan.spec
  key = refs.key[0, t].astype(jnp.float32)
  h = refs.value[0, t].astype(jnp.float32)
  before = writes.Columns(refs.squares[...], refs.untouched[...])
  if spec.objective == "decoding":
    refs.rows[CODE] = writes.over_norm(key, before.squares, spec)
    h = plan_lib.combine(plan, base, refs.rows, CODE) - h
  elif spec.objective == "similarity":
    h = -h
  share = plan_lib.dots(plan, base, h)
  share = pairs.all_parts(share, plan.lanes.parts)
  length = pairs.all_parts(pairs.sum_row(h * h), plan.lanes.parts)
  gates = plan_lib.gates(refs.gates[0, t])
  found, after = plan_lib.find(spec, share, length, before, key, gates)
  refs.rows[KEEP], refs.rows[WRITE] = found.keep, found.write
  if found.along is not None:
    refs.rows[ALONG] = found.along
  refs.squares[...], refs.untouched[...] = after
  return h, share, length


def written(refs: Any, m: int, column: jax.Array, h: jax.Array) -> jax.Array:
  """Returns a column after a token's write."""
  kept = plan_lib.row(refs.rows, KEEP, m) * column
  column = kept + plan_lib.row(refs.rows, WRITE, m) * h
  if refs.base is None:
    return column
  return column - plan_lib.row(refs.rows, ALONG, m) * refs.base[m]


def ending(refs: Any, plan: plan_lib.Plan, memory: jax.Ref):
  """Computes how columns are normalised at a tile's end.

  Returns:
    The inverse of their lengths, where they have one. Then two masks, bool
    `[slots, lanes]`: which columns to normalise, and which columns have no
    length, such that the base replaces them.
  """
  found = squares(plan, memory)
  sized = found > reference.TINY
  inverse = lax.rsqrt(jnp.where(sized, found, 1))
  if not plan.spec.chunked:
    return inverse, sized & (refs.untouched[...] == 0), None
  complete = flag(refs, plan_lib.COMPLETE)
  return inverse, sized & complete, ~sized & complete


def finish(refs: Refs, plan: plan_lib.Plan) -> None:
  """Normalises columns to length 1 at a tile's end."""
  if not plan.spec.unit_columns:
    return
  carried = refs.final.at[0]
  inverse, sized, empty = ending(refs, plan, carried)
  refs.rows[KEEP] = jnp.where(sized, inverse, 1.0)
  if empty is not None:
    refs.rows[ALONG] = jnp.where(empty, 1.0, 0.0)
  for m in range(plan.slots):
    column = plan_lib.row(refs.rows, KEEP, m) * carried[m]
    if empty is not None:
      use = plan_lib.row(refs.rows, ALONG, m) > 0
      column = jnp.where(use, refs.base[m], column)
    carried[m] = column


def run(refs: Refs, plan: plan_lib.Plan) -> None:
  """Runs the kernel's body for one grid step."""
  carried = refs.final.at[0]

  @pl.when(pl.program_id(1) == 0)
  def _():
    carried[...] = refs.memory[0]
    if refs.last is not None:
      refs.last[...] = jnp.zeros_like(refs.last)

  if refs.saved is not None:  # before the reset, which backward repeats
    refs.saved[0, 0] = carried[...]
  begin(refs, plan, carried)
  if refs.last is not None:
    is_last = flag(refs, plan_lib.LAST)
    for m in range(plan.slots):
      refs.last[0, m] = jnp.where(is_last, refs.base[m], refs.last[0, m])

  def body(t, carry):
    base = carried if refs.base is None else refs.base
    h, _, _ = token(refs, plan, t, base)
    refs.rows[QUERY] = refs.query[0, t].astype(jnp.float32)
    output: Any = 0.0
    for m in range(plan.slots):
      column = written(refs, m, carried[m], h)
      carried[m] = column
      output = output + column * plan_lib.row(refs.rows, QUERY, m)
    refs.output[0, t] = output.astype(refs.output.dtype)
    return carry

  lax.fori_loop(0, plan.tokens, body, 0)
  finish(refs, plan)
