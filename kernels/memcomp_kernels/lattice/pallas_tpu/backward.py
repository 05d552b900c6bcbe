"""Lattice backward on a TPU: from the last tile to the first, token by token.

The kernel recomputes a tile from the memory before it, and keeps all the tile's
memories in VMEM. Let D be the adjoint of the memory after a token and E the
adjoint of the token's base (see `plan`). s' are the base's columns. Rows are
by slot:

  D   <- D + dy q^T                     dq = <s_t, dy>
  dkeep = <s_{t-1}, D>   dwrite = <h, D>   dalong = -<s', D>
  dshare, d|h|^2, dN, dk, dmu, dgamma   by the pullback of `plan_lib.find`
  dh  = sum_m write D + dshare s', + 2 d|h|^2 h
  E   = h dshare + dh code - along D    dcode = <s', dh>, dv = -dh ("decoding")
  D   <- keep D                         and plus E, per token
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memcomp_kernels.lattice.pallas_tpu import forward
from memcomp_kernels.lattice.pallas_tpu import plan as plan_lib
from memcomp_kernels.lattice.per_token import writes
from memcomp_kernels.pallas_tpu import LANES, pairs


class Refs(NamedTuple):
  """Blocks of one step; `forward.Refs` describes those that both kernels have.

  Attributes:
    query: See `forward.Refs`.
    key: See `forward.Refs`.
    value: See `forward.Refs`.
    gates: See `forward.Refs`.
    flags: See `forward.Refs`.
    saved: See `forward.Refs`; the memory before the tile.
    reset: See `forward.Refs`.
    start: See `forward.Refs`.
    d_output: Adjoint of the output, shaped as `value`.
    d_final: Adjoint of the final memory.
    d_chunk_start: Adjoint of the last chunk's start; None without flags or
      chunks.
    d_query: Adjoint of `query`.
    d_key: Adjoint of `key`.
    d_value: Adjoint of `value`.
    d_gates: Adjoint of `gates`; each part stores its share.
    d_memory: Adjoint of the memory, carried from tile to tile.
    d_reset: Adjoint of `reset`; None without flags.
    d_start: Adjoint of `start`; None without flags or chunks.
    d_base: Adjoint of the base, scratch; None without chunks. All scratch is
      float32.
    d_squares: Adjoint of `squares`, `[slots, lanes]`, scratch.
    states: The tile's memories, `[tokens + 1, slots, rows, lanes]`, scratch.
    written: h of each token, `[tokens, rows, lanes]`, scratch.
    shares: Products of h with the base's columns, `[tokens, slots, lanes]`,
      scratch.
    lengths: |h|^2, `[tokens, 1, lanes]`, scratch.
    before: Columns before each token, `[tokens, 2, slots, lanes]`, scratch;
      None with chunks.
    base: See `forward.Refs`.
    rows: See `forward.Refs`.
    squares: See `forward.Refs`.
    untouched: See `forward.Refs`.
  """

  query: jax.Ref
  key: jax.Ref
  value: jax.Ref
  gates: jax.Ref
  flags: Any
  saved: jax.Ref
  reset: Any
  start: Any
  d_output: jax.Ref
  d_final: jax.Ref
  d_chunk_start: Any
  d_query: jax.Ref
  d_key: jax.Ref
  d_value: jax.Ref
  d_gates: jax.Ref
  d_memory: jax.Ref
  d_reset: Any
  d_start: Any
  d_base: Any
  d_squares: jax.Ref
  states: jax.Ref
  written: jax.Ref
  shares: jax.Ref
  lengths: jax.Ref
  before: Any
  base: Any
  rows: jax.Ref
  squares: jax.Ref
  untouched: jax.Ref


def _recompute(refs: Refs, plan: plan_lib.Plan) -> None:
  """Recomputes the tile's memories and its tokens' writes."""
  refs.states[0] = refs.saved[0, 0]
  forward.begin(refs, plan, refs.states.at[0])

  def body(t, carry):
    if refs.before is not None:
      refs.before[t, 0] = refs.squares[...]
      refs.before[t, 1] = refs.untouched[...]
    state = refs.states.at[t]
    base = state if refs.base is None else refs.base
    h, refs.shares[t], refs.lengths[t] = forward.token(refs, plan, t, base)
    refs.written[t] = h
    for m in range(plan.slots):
      refs.states[t + 1, m] = forward.written(refs, m, state[m], h)
    return carry

  lax.fori_loop(0, plan.tokens, body, 0)


def _pull_ending(refs: Refs, plan: plan_lib.Plan) -> None:
  """Computes the adjoint through the normalisation at the tile's end."""
  carried, unit = refs.d_memory.at[0], plan.spec.unit_columns
  last = refs.states.at[plan.tokens]
  if unit:
    inverse, sized, empty = forward.ending(refs, plan, last)
    along = plan_lib.dots(plan, last, carried)
    along = pairs.all_parts(along, plan.lanes.parts)
    kept = jnp.where(sized, inverse, 1.0)
    if empty is not None:
      kept = jnp.where(empty, 0.0, kept)
      refs.rows[forward.ALONG] = jnp.where(empty, 1.0, 0.0)
    refs.rows[forward.KEEP] = kept
    off = inverse * inverse * inverse * along
    refs.rows[forward.WRITE] = jnp.where(sized, off, 0.0)
  for m in range(plan.slots):
    d = carried[m]
    if unit:
      off = plan_lib.row(refs.rows, forward.WRITE, m) * last[m]
      carried[m] = plan_lib.row(refs.rows, forward.KEEP, m) * d - off
    if refs.base is None:
      continue
    is_last = forward.flag(refs, plan_lib.LAST)
    d_base = jnp.where(is_last, refs.d_chunk_start[0, m], 0.0)
    if unit:
      d_base = d_base + plan_lib.row(refs.rows, forward.ALONG, m) * d
    refs.d_base[m] = d_base


def _pull_beginning(refs: Refs, plan: plan_lib.Plan) -> None:
  """Computes the adjoint through what happens at the tile's beginning."""
  refs.rows[forward.KEEP] = 2.0 * pairs.all_parts(
    refs.d_squares[...], plan.lanes.parts
  )
  carried = refs.d_memory.at[0]
  base = refs.states.at[0] if refs.base is None else refs.base
  for m in range(plan.slots):
    d = carried[m]
    by_square = plan_lib.row(refs.rows, forward.KEEP, m) * base[m]
    if refs.base is None:
      d = d + by_square
    else:
      d_base = refs.d_base[m] + by_square
      continues = forward.flag(refs, plan_lib.CONTINUES)
      refs.d_start[0, m] += jnp.where(continues, d_base, 0.0)
      d = d + jnp.where(continues, 0.0, d_base)
    if plan.flagged:
      resets = forward.flag(refs, plan_lib.RESETS)
      refs.d_reset[0, m] += jnp.where(resets, d, 0.0)
      d = jnp.where(resets, 0.0, d)
    carried[m] = d


def _pull_token(refs: Refs, plan: plan_lib.Plan, t: jax.Array) -> None:
  """Computes the adjoint through one token."""
  spec, parts, carried = plan.spec, plan.lanes.parts, refs.d_memory.at[0]
  rows, state, after = refs.rows, refs.states.at[t], refs.states.at[t + 1]
  base = state if refs.base is None else refs.base
  h, dy = refs.written[t], refs.d_output[0, t].astype(jnp.float32)
  key = refs.key[0, t].astype(jnp.float32)
  if refs.before is None:  # then these are the base's columns
    before = writes.Columns(refs.squares[...], refs.untouched[...])
  else:
    before = writes.Columns(refs.before[t, 0], refs.before[t, 1])
  (found, _), pull = jax.vjp(
    lambda *x: plan_lib.find(spec, *x),
    refs.shares[t],
    refs.lengths[t],
    before,
    key,
    plan_lib.gates(refs.gates[0, t]),
  )
  rows[forward.QUERY] = refs.query[0, t].astype(jnp.float32)
  rows[forward.KEEP], rows[forward.WRITE] = found.keep, found.write
  if found.along is not None:
    rows[forward.ALONG] = found.along

  dh: Any = 0.0
  sums: Any = ([], [], [], [])
  for group in plan.groups():
    products: Any = ([], [], [], [])
    for m in group:
      d = carried[m] + plan_lib.row(rows, forward.QUERY, m) * dy
      carried[m] = d
      dh = dh + plan_lib.row(rows, forward.WRITE, m) * d
      products[0].append(pairs.folded(after[m] * dy))
      products[1].append(pairs.folded(state[m] * d))
      products[2].append(pairs.folded(h * d))
      if found.along is not None:
        products[3].append(pairs.folded(base[m] * d))
    for total, product in zip(sums, products, strict=True):
      if product:
        total.append(pairs.sum_rows(product))
  summed: Any = [jnp.concatenate(x, 0) if x else None for x in sums]
  d_query, d_keep, d_write, d_along = summed
  d_query = pairs.in_first_part(d_query, parts)
  refs.d_query[0, t] = d_query.astype(refs.d_query.dtype)
  d_found = plan_lib.Write(
    d_keep, d_write, None if d_along is None else -d_along
  )
  d_after = writes.Columns(refs.d_squares[...], jnp.zeros(plan.by_slot))
  d_share, d_length, d_before, d_key, d_gates = pull((d_found, d_after))
  rows[forward.D_SHARE] = pairs.all_parts(d_share, parts)
  d_squares = d_before.squares
  dh = dh + 2.0 * pairs.all_parts(d_length, parts) * h
  dh = dh + plan_lib.combine(plan, base, rows, forward.D_SHARE)
  decoding = spec.objective == "decoding"
  if decoding:
    code, pull_code = jax.vjp(
      lambda key, squares: writes.over_norm(key, squares, spec),
      key,
      before.squares,
    )
    rows[forward.CODE] = code
    d_code = plan_lib.dots(plan, base, dh)
    by_code = pull_code(d_code)
    d_key, d_squares = d_key + by_code[0], d_squares + by_code[1]
  refs.d_squares[...] = d_squares
  for m in range(plan.slots):
    d = carried[m]
    d_base = plan_lib.row(rows, forward.D_SHARE, m) * h
    if decoding:
      d_base = d_base + plan_lib.row(rows, forward.CODE, m) * dh
    kept = plan_lib.row(rows, forward.KEEP, m) * d
    if refs.base is None:
      carried[m] = kept + d_base
    else:
      carried[m] = kept
      refs.d_base[m] += d_base - plan_lib.row(rows, forward.ALONG, m) * d
  refs.d_key[0, t] = pairs.in_first_part(d_key, parts).astype(refs.d_key.dtype)
  d_value = dh if spec.objective == "encoding" else -dh
  refs.d_value[0, t] = d_value.astype(refs.d_value.dtype)
  unused = jnp.zeros((plan_lib.ROWS - 2, LANES), jnp.float32)
  refs.d_gates[0, t] = jnp.concatenate([d_gates.decay, d_gates.rate, unused], 0)


def run(refs: Refs, plan: plan_lib.Plan) -> None:
  """Runs the kernel's body for one grid step."""

  @pl.when(pl.program_id(1) == 0)
  def _():
    refs.d_memory[0] = refs.d_final[0]
    for d in (refs.d_reset, refs.d_start):
      if d is not None:
        d[...] = jnp.zeros_like(d)

  _recompute(refs, plan)
  _pull_ending(refs, plan)
  refs.d_squares[...] = jnp.zeros(plan.by_slot, jnp.float32)

  def body(i, carry):
    _pull_token(refs, plan, plan.tokens - 1 - i)
    return carry

  lax.fori_loop(0, plan.tokens, body, 0)
  _pull_beginning(refs, plan)
