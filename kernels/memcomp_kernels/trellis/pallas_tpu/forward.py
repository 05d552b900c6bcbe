"""Trellis forward on a TPU: each step runs both passes of chunks and heads.

The kernel runs the algebra of `tile` by slot (see `pallas_tpu.blocks`). Slots
are on sublanes, the tokens of a unit's heads on lanes. Memories are halved,
because the activations take half the pre-activations. With separable decay,
Omega_{ri} = mu_r / mu_i for i <= r. Write rates absorb 1 / mu_i and reads
absorb mu_r, so that one scaled U serves both the reads and the update. The safe
form multiplies scores with Omega instead.

Where U comes from depends on where gradients are taken: `chunk_start` and
`per_token`.
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
  """Blocks of one grid step; see `plan` for their shapes.

  Attributes:
    flags: int32 `[batch, chunks]` of `layout.RESETS` and so on; None if all
      chunks are full and belong to one segment.
    query: Queries by token.
    key: Keys by token.
    value: Values by token.
    target: Targets by slot; by token with gradients per token.
    rows: Gates by unit.
    lanes: Gates by lane; None without gradients per token.
    memories: Halved memories before the first token.
    reset: Halved memories that a segment starts from; None without flags.
    start: Halved memories at the start of a chunk that an earlier call has
      begun; None without flags and with gradients per token.
    output: Outputs by token.
    final: Halved memories after the last token.
    last: Halved memories at which the last chunk's gradients are taken; None
      without flags and with gradients per token.
    saved: Halved memories at each chunk's start; None if not wanted.
    carried: Memories between steps, float32 scratch.
    solver: Scratch of `substitution`; None without gradients per token.
  """

  flags: Any
  query: jax.Ref
  key: jax.Ref
  value: jax.Ref
  target: jax.Ref
  rows: jax.Ref
  lanes: Any
  memories: plan_lib.Pair
  reset: Any
  start: Any
  output: jax.Ref
  final: plan_lib.Pair
  last: Any
  saved: Any
  carried: plan_lib.Pair
  solver: Any


def run(refs: Refs, plan: plan_lib.Plan, writes: Any) -> None:
  """Runs the kernel's body for one grid step.

  Args:
    refs: Blocks.
    plan: Plan of the kernel.
    writes: The module `chunk_start` or `per_token`.
  """
  unit = plan.unit
  heads, tokens = unit.heads, unit.tokens
  batch, step = pl.program_id(0), pl.program_id(2)

  @pl.when(step == 0)
  def _():
    for carried, memory in zip(refs.carried, refs.memories, strict=True):
      for g in range(plan.step_units):
        carried[g] = memory[plan.place(g)]
    if refs.last is not None:
      for last in refs.last:
        last[...] = jnp.zeros_like(last)

  causal = blocks.causal(tokens, heads)

  def piece(s: int, g: int) -> schedule.Piece:
    q, k, v = plan_lib.load(refs, plan, s, g)
    directions = writes.Directions(refs, plan, s, g)
    place = plan.place(g)
    gates = writes.Gates.of(refs.rows[(*place, s)], plan)
    omega = gates.omega(causal)
    yield schedule.READS
    memories = [carried[g] for carried in refs.carried]
    starts = memories
    if refs.flags is not None:
      flags = refs.flags[batch * plan.rows + place[0], step * plan.chunks + s]
      resets = (flags & layout_lib.RESETS) != 0
      memories = [
        jnp.where(resets, reset[place], memory)
        for reset, memory in zip(refs.reset, memories, strict=True)
      ]
      starts = memories
      if s == 0 and refs.start is not None:
        # Only the very first chunk can have begun in an earlier call.
        continues = (flags & layout_lib.CONTINUES) != 0
        starts = [
          jnp.where(continues, start[place], memory)
          for start, memory in zip(refs.start, memories, strict=True)
        ]
      if refs.last is not None:
        is_last = (flags & layout_lib.LAST) != 0
        for last, start in zip(refs.last, starts, strict=True):
          last[place] = jnp.where(is_last, start, last[place])
    if refs.saved is not None:
      for saved, memory in zip(refs.saved, memories, strict=True):
        saved[(s, *place)] = memory.astype(saved.dtype)
    kb, vb = blocks.diagonal(k, heads), blocks.diagonal(v, heads)
    dtype = q.dtype
    mk, mv = (memory.astype(dtype) for memory in memories)
    z1 = nt(starts[0].astype(dtype), kb)
    z2 = nt(starts[1].astype(dtype), vb)
    yield from directions.begin(gates, (z1, z2), lambda: (nt(k, kb), nt(v, vb)))
    yield None
    scores = nt(q, kb)
    qb = blocks.diagonal(q, heads)
    # In the safe form, reads need the decay between the matmuls.
    join = plan.join and not plan.safe
    mq = None if join else nt(mk, qb)
    yield None
    u1 = directions.write(0)
    u1b = u1.astype(dtype)
    yield None
    u2 = directions.write(1)
    u2b = u2.astype(dtype)
    scores = gates.weigh(0, scores, causal, omega[0]).astype(dtype)
    pb = blocks.diagonal(scores, heads)
    factors = [(mk, qb), (u1b, pb)] if join else [(u1b, pb)]
    rest = blocks.sum_nt(join, *factors)
    yield None
    for carried, memory, u, w, p in zip(
      refs.carried, memories, (u1, u2), (kb, vb), (0, 1), strict=True
    ):
      carried[g] = gates.advance(p, memory, u, w)
    yield schedule.WROTE
    code = activations.activate(
      plan.read, gates.read(mq, rest), plan.read_eps, gates.code_scale
    )
    yield None
    code = blocks.transpose(code.astype(dtype), heads)
    yield None
    scores = nn(code, blocks.diagonal(u2b, heads))
    nb = blocks.diagonal(mv, heads)
    fm = None if join else nn(code, nb)
    yield None
    scores = gates.weigh(1, scores, causal, omega[1]).astype(dtype)
    factors = [(code, nb), (scores, vb)] if join else [(scores, vb)]
    rest = blocks.sum_nn(join, *factors)
    yield None
    plan_lib.store(refs.output, plan, s, g, gates.output(fm, rest))

  writes.forward(refs, plan, piece)

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    for final, carried in zip(refs.final, refs.carried, strict=True):
      for g in range(plan.step_units):
        final[plan.place(g)] = carried[g]
