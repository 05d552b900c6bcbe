"""Trellis backward on a TPU: from the last chunk to the first.

The kernel recomputes each chunk from the memories at its start, which the
forward kernel saved. All adjoints are those of the halved memories and
directions. M and N are the key and the value memory, and F is the code. U_K and
U_V are the scaled write directions of the two memories; they are added, because
the rates are negative. P and P_V are the weighed scores of pass 1 and 2. D are
the weighed scores of dY and V. A is the adjoint of pass 1's read as pass 1
weighs it, and E is that adjoint times mu:

  dF  = N dY^T + U_V D^T      dU_V = F D + dN' V^T     dN = dN' + F dY + dZ V
  E   = mu f'(dF)             dU_K = A P + dM' K^T     dM = dM' + E Q  + dZ K
  dQ  = E^T M + dP K
  dK  = dZ^T M + dP^T Q + U_K^T dM'
  dV  = dZ^T N + P_V^T dY + U_V^T dN'

Here dM' and dN' are decayed. Every term of a read at r contains exp(log mu_r),
and every term with U_i contains exp(-log mu_i). The memory after the chunk
contains exp(log mu_C). So the adjoint of log mu is sum(dR R) + sum(dF F) -
sum(dU U) over slots. The last token adds sum(dM' M'), where dM' M' = dM' M +
dM' U^T K, decayed. This needs no division by a decay. But it is a difference,
exact only up to the rounding of its terms. Where tokens forget nearly all, a
gradient below that rounding is lost.

With gradients per token (`per_token`), `substitution` computes U and dZ. dZ
decays as Z does and replaces the dZ above. Z contains products of written
tokens, which add (A + A^T) K to dK. In that term, A is the adjoint dZ^T U of
these products, decayed. dV gets the corresponding term.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.pallas_tpu import activations, blocks, schedule
from memcomp_kernels.trellis.pallas_tpu import plan as plan_lib

nn, nt = blocks.nn, blocks.nt


class Refs(NamedTuple):
  """Blocks of one grid step, in the layouts of the forward kernel.

  Attributes:
    flags: See `forward.Refs`.
    query: Queries by token.
    key: Keys by token.
    value: Values by token.
    target: Targets by slot; by token with gradients per token.
    rows: Gates by unit.
    lanes: Gates by lane; None without gradients per token.
    saved: Halved memories at the chunks' starts.
    start: See `forward.Refs`; halved.
    d_output: Adjoint of outputs, by token.
    d_final: Adjoint of the halved final memories.
    d_chunk_start: Adjoint of the halved memories at the last chunk's start;
      None without flags.
    d_query: Adjoint of queries, by token.
    d_key: Adjoint of keys, by token.
    d_value: Adjoint of values, by token.
    d_target: Adjoint of `target`, in the same layout.
    d_rows: Adjoint of the gates.
    d_lanes: Adjoint of the gates by lane.
    d_memories: Adjoint of the halved memories before the first token.
    d_reset: Adjoint of `reset`; None without flags.
    d_start: Adjoint of `start`; None without flags.
    carried: Adjoint of the memories after the chunk, float32 scratch.
    solver: Scratch of `substitution`; None without gradients per token.
  """

  flags: Any
  query: jax.Ref
  key: jax.Ref
  value: jax.Ref
  target: jax.Ref
  rows: jax.Ref
  lanes: Any
  saved: plan_lib.Pair
  start: Any
  d_output: jax.Ref
  d_final: plan_lib.Pair
  d_chunk_start: Any
  d_query: jax.Ref
  d_key: jax.Ref
  d_value: jax.Ref
  d_target: jax.Ref
  d_rows: jax.Ref
  d_lanes: Any
  d_memories: plan_lib.Pair
  d_reset: Any
  d_start: Any
  carried: plan_lib.Pair
  solver: Any


def run(refs: Refs, plan: plan_lib.Plan, writes: Any) -> None:
  """Runs the kernel's body for one grid step; arguments as in `forward`."""
  unit = plan.unit
  heads, tokens = unit.heads, unit.tokens
  batch, step = pl.program_id(0), pl.program_id(2)
  last_step = pl.num_programs(2) - 1
  flagged = refs.flags is not None

  @pl.when(step == 0)
  def _():
    for p in (0, 1):
      for g in range(plan.step_units):
        refs.carried[p][g] = refs.d_final[p][plan.place(g)]
      if flagged:
        refs.d_reset[p][...] = jnp.zeros_like(refs.d_reset[p])
      if refs.d_start is not None:
        refs.d_start[p][...] = jnp.zeros_like(refs.d_start[p])

  causal = blocks.causal(tokens, heads)
  anticausal = blocks.causal(tokens, heads, transposed=True)
  strict = causal & ~anticausal, anticausal & ~causal

  def piece(s: int, g: int) -> schedule.Piece:
    q, k, v = plan_lib.load(refs, plan, s, g)
    directions = writes.Directions(refs, plan, s, g)
    place = plan.place(g)
    dy = refs.d_output[plan_lib.tokens_of(plan, s, g, unit.widths[1])]
    gates = writes.Gates.of(refs.rows[(*place, s)], plan)
    dtype = q.dtype
    memories = [saved[(s, *place)] for saved in refs.saved]
    starts = memories
    resets: Any = None  # not read without flags
    continues: Any = None
    last: Any = None
    if flagged:
      chunk = (last_step - step) * plan.chunks + s
      flags = refs.flags[batch * plan.rows + place[0], chunk]
      resets = (flags & layout_lib.RESETS) != 0
      continues = (flags & layout_lib.CONTINUES) != 0
      last = (flags & layout_lib.LAST) != 0
      if s == 0 and refs.start is not None:
        starts = [
          jnp.where(continues, start[place], memory.astype(jnp.float32)).astype(
            dtype
          )
          for start, memory in zip(refs.start, memories, strict=True)
        ]
    kb, vb = blocks.diagonal(k, heads), blocks.diagonal(v, heads)
    z1, z2 = nt(starts[0], kb), nt(starts[1], vb)
    yield from directions.begin(gates, (z1, z2), lambda: (nt(k, kb), nt(v, vb)))
    yield None
    qb, dyb = blocks.diagonal(q, heads), blocks.diagonal(dy, heads)
    scores = nt(q, kb)
    d = nt(dy, vb)
    join = plan.join and not plan.safe
    mq: Any = None
    ndy: Any = None
    if not join:
      mq, ndy = nt(memories[0], qb), nt(memories[1], dyb)
    yield None

    u1 = directions.write_again(0)
    u1b = u1.astype(dtype)
    pb = blocks.diagonal(gates.weigh(0, scores, causal).astype(dtype), heads)
    yield None
    factors = [(memories[0], qb), (u1b, pb)] if join else [(u1b, pb)]
    rest = blocks.sum_nt(join, *factors)
    u2 = directions.write_again(1)
    u2b = u2.astype(dtype)
    db = blocks.diagonal(gates.weigh(1, d, causal).astype(dtype), heads)
    yield None
    read = gates.read(mq, rest)
    code, pull_read = jax.vjp(
      lambda half: activations.activate(
        plan.read, half, plan.read_eps, gates.code_scale
      ),
      read,
    )
    codeb = code.astype(dtype)
    if join:
      d_code = blocks.sum_nt(True, (memories[1], dyb), (u2b, db))
    elif plan.safe:
      d_code = gates.mu[1] * ndy + nt(u2b, db)
    else:
      d_code = ndy + nt(u2b, db)
    yield schedule.READS
    after = [carried[g] for carried in refs.carried]
    kept = [gates.total[p] * after[p] for p in (0, 1)]
    # The part of the adjoint after the chunk that reaches U_i. If separable, it
    # is decayed here; if safe, U's own row decays it.
    seen = [(after[p] if plan.safe else kept[p]).astype(dtype) for p in (0, 1)]
    ends: plan_lib.Pair = gates.to_end if plan.safe else (1.0, 1.0)
    d_kept = tuple(d * x for d, x in zip(kept, memories, strict=True))
    by_update = ends[1] * nt(seen[1], vb)
    d_update = by_update * u2
    du2 = nn(codeb, db) + by_update
    (d_read,) = pull_read(d_code)
    d_reads = gates.sum_reads(d_read * read, d_code * code)
    e = gates.mu[0] * d_read
    a = (d_read if plan.safe else e).astype(dtype)
    e = e.astype(dtype)
    yield None
    directions.take_adjoint(1, du2)
    by_update = ends[0] * nt(seen[0], kb)
    d_ends = gates.sum_ends(d_kept, (by_update * u1, d_update))
    du1 = nn(a, pb) + by_update
    u1t, u2t = (
      blocks.transpose((u * end).astype(dtype), heads)
      for u, end in ((u1, ends[0]), (u2, ends[1]))
    )
    et = blocks.transpose(e, heads)
    yield None
    directions.take_adjoint(0, du1)
    yield from directions.end()
    dz1, dz2 = directions.pulled()
    by_products = directions.by_products((u1b, u2b), (kb, vb), strict)
    dz2t = blocks.transpose(dz2, heads)
    code_y = (code * gates.mu[1]).astype(dtype) if plan.safe else codeb
    by_pass2 = [(code_y, dyb), (dz2, vb)]
    yield None
    directions.finish()
    if plan.safe:  # U without decay to the end, and A as pass 1 weighs it
      at = blocks.transpose(a, heads)
      u1s, u2s = (blocks.transpose(u, heads) for u in (u1b, u2b))
    else:
      at, u1s, u2s = et, u1t, u2t
    dp = gates.weigh(0, nn(at, blocks.diagonal(u1b, heads)), causal)
    dpt = gates.weigh_transposed(
      0, nn(u1s, blocks.diagonal(a, heads)), anticausal
    )
    p2t = gates.weigh_transposed(
      1, nn(u2s, blocks.diagonal(codeb, heads)), anticausal
    )
    dp, dpt, p2t = (x.astype(dtype) for x in (dp, dpt, p2t))
    by_pass1 = [(e, qb), (dz1, kb)]
    dz1t = blocks.transpose(dz1, heads)
    yield None
    refs.d_rows[(*place, s)] = directions.row_adjoints(d_reads, d_ends)
    for p, factors in enumerate((by_pass1, by_pass2)):
      if not flagged:
        refs.carried[p][g] = kept[p] + blocks.sum_nn(plan.join, *factors)
        continue
      by_read, by_z = (nn(*pair) for pair in factors)
      d_memory = kept[p] + by_read
      d_begin = by_z
      if refs.d_chunk_start is not None:
        d_begin += jnp.where(last, refs.d_chunk_start[p][place], 0.0)
      if s == 0 and refs.d_start is not None:
        refs.d_start[p][place] += jnp.where(continues, d_begin, 0.0)
        d_memory = d_memory + jnp.where(continues, 0.0, d_begin)
      else:
        d_memory = d_memory + d_begin
      refs.d_reset[p][place] += jnp.where(resets, d_memory, 0.0)
      refs.carried[p][g] = jnp.where(resets, 0.0, d_memory)
    yield schedule.WROTE
    mb, nb = (blocks.diagonal(memory, heads) for memory in memories)
    dq = blocks.sum_nn(plan.join, (et, mb), (dp, kb))
    plan_lib.store(refs.d_query, plan, s, g, dq)
    yield None
    sb = [
      b if start is memory else blocks.diagonal(start, heads)
      for b, start, memory in zip((mb, nb), starts, memories, strict=True)
    ]
    after = [blocks.diagonal(x, heads) for x in seen]
    dv = blocks.sum_nn(
      plan.join, (dz2t, sb[1]), (p2t, dyb), (u2t, after[1]), *by_products[1]
    )
    plan_lib.store(refs.d_value, plan, s, g, dv)
    yield None
    dk = blocks.sum_nn(
      plan.join, (dz1t, sb[0]), (dpt, qb), (u1t, after[0]), *by_products[0]
    )
    plan_lib.store(refs.d_key, plan, s, g, dk)

  writes.backward(refs, plan, piece)

  @pl.when(step == last_step)
  def _():
    for d_memories, carried in zip(refs.d_memories, refs.carried, strict=True):
      for g in range(plan.step_units):
        d_memories[plan.place(g)] = carried[g]
