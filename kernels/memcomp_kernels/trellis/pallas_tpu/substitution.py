"""Trellis's exact write directions per token on a TPU, token by token.

Within a tile, z are the halved pre-activations of a pass. M is the pass's
memory, w are the keys or values that it writes, and u the write directions. u
includes the write rate and is added to the memory (see `tile`):

  z_t = mu_{t-1} M w_t + sum_{i<t} Omega_{t-1,i} (w_i . w_t) u_i,   u_t = g(z_t)

The matrix unit computes M w_t and the products w_i . w_t. The vector unit
computes the rest in a loop over tokens. It runs both passes and many heads side
by side on lanes (see `pallas_tpu.lanes`). The adjoint is the same loop from the
last token to the first, and it is linear:

  dz_t = J_t (du_t + sum_{s>t} Omega_{s-1,t} (w_t . w_s) dz_s)

z_t is homogeneous in mu_{t-1}, so the adjoint of log mu_{t-1} is dz_t . z_t.
Each use of u_t has a log decay, whose adjoint is -du_t . u_t. `backward` uses
the same argument.
"""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.pallas_tpu import LANES, activations, lanes
from memcomp_kernels.trellis.pallas_tpu import plan as plan_lib

Plan = plan_lib.PerTokenPlan


class Scratch(NamedTuple):
  """Scratch of one tile, float32; see `pallas_tpu.lanes` for the layouts.

  Attributes:
    by_slot: By unit, places are slots: M w, later du.
    by_token: By unit, places are tokens, lanes `[heads, slots]`: targets.
    scores: By unit, places are tokens, lanes `[heads, tokens]`: w_t . w_i.
    base: By lane, one slot after the other: M w, later du.
    target: By lane, one token after the other: targets, later their adjoint.
    coupling: By lane, `[tokens, 128]` per token t; row i is the factor of u_i
      in z_t.
    u: By lane, one token after the other.
    z: By lane, one token after the other; only in the backward kernel, where dz
      replaces it.
    back: Columns that return to units, `[slots * rows, 128]`.
  """

  by_slot: Any
  by_token: Any
  scores: Any
  base: Any
  target: Any
  coupling: Any
  u: Any
  z: Any
  back: Any


def scratch(plan: Plan, *, backward: bool) -> Scratch:
  """Returns the shapes of `Scratch`."""
  unit, rows = plan.unit, plan.lane_rows
  slots, tokens = unit.slots, unit.tokens

  def array(*shape):
    return pltpu.VMEM((*shape, LANES), jnp.float32)

  registers = -(-unit.heads * slots // LANES)
  by_lane = array(tokens * slots)
  return Scratch(
    by_slot=array(1, rows * slots),
    by_token=array(registers, rows * tokens),
    scores=array(1, rows * tokens),
    base=by_lane,
    target=by_lane,
    coupling=array(tokens * tokens),
    u=by_lane,
    z=by_lane if backward else None,
    back=array(slots * rows),
  )


def stage(
  refs: Scratch,
  plan: Plan,
  g: int,
  reads: plan_lib.Pair,
  scores: plan_lib.Pair,
  target: jax.Array,
) -> None:
  """Stores a unit's inputs in scratch.

  Args:
    refs: Scratch.
    plan: Plan of the kernel.
    g: Index of the unit.
    reads: M w by slot, of both passes.
    scores: w_t . w_i by token, `[tokens, lanes]`, of both passes.
    target: Targets by token, `[tokens, heads * slots]`.
  """
  unit = plan.unit
  for p in (0, 1):
    row = plan.lane_row(p, g)
    refs.by_slot[0, pl.ds(row * unit.slots, unit.slots), :] = reads[p]
    tokens = pl.ds(row * unit.tokens, unit.tokens)
    refs.scores[0, tokens, :] = scores[p]
    for register, part in enumerate(_registers(target.astype(jnp.float32))):
      refs.by_token[register, tokens, pl.ds(0, part.shape[1])] = part


def stage_adjoint(refs: Scratch, plan: Plan, g: int, du: plan_lib.Pair) -> None:
  """Stores a unit's adjoint of u by slot, in the place of M w."""
  slots = plan.unit.slots
  for p in (0, 1):
    refs.by_slot[0, pl.ds(plan.lane_row(p, g) * slots, slots), :] = du[p]


def _registers(x: jax.Array) -> list[jax.Array]:
  """Splits `[rows, n]` into parts of 128 lanes; the last may have fewer."""
  return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _columns_to_lanes(refs: Scratch, plan: Plan) -> None:
  unit = plan.unit
  for slot in range(0, unit.slots, unit.heads):
    _to_lanes(refs.by_slot, refs.base, plan, slot, unit.slots, unit.tokens)


def _tokens_to_lanes(refs: Scratch, plan: Plan, token: int) -> None:
  """Moves targets and coupling of as many tokens as heads to lanes."""
  slots, tokens = plan.unit.slots, plan.unit.tokens
  _to_lanes(refs.by_token, refs.target, plan, token, tokens, slots)
  _to_lanes(refs.scores, refs.coupling, plan, token, tokens, tokens)


def _to_lanes(source, destination, plan, place, places, size) -> None:
  heads = plan.unit.heads
  found = lanes.to_lanes(source, places, place, heads=heads, size=size)
  destination[pl.ds(place * size, heads * size), :] = found


class _Rows(NamedTuple):
  """Rows by lane; users load them late, as registers are few."""

  ref: jax.Ref
  plan: Plan

  def of(self, name: str, tokens: Any) -> Any:
    """Returns rows `[tokens, 128]`, or a number."""
    if name == "eps" and self.plan.phi_eps is not None:
      return self.plan.phi_eps
    at = self.plan.lane_row_names.index(name)
    return self.ref[0, 0, 0, at, tokens, :]


def _blocks(plan: Plan) -> list[range]:
  """Blocks of tokens whose sums are computed together.

  Each block reads every earlier u only once.
  """
  size = max(2 * 64 // max(plan.unit.slots, 64), 1)
  tokens = plan.unit.tokens
  return [range(first, first + size) for first in range(0, tokens, size)]


def solve(refs: Scratch, rows: jax.Ref, plan: Plan) -> None:
  """Computes u (and z) by lane from what `stage` stored."""
  slots, tokens = plan.unit.slots, plan.unit.tokens
  _columns_to_lanes(refs, plan)
  own = _Rows(rows, plan)
  # The other moves run while the vector unit waits for earlier tokens.
  moves = collections.deque(range(0, tokens, plan.unit.heads))
  for block in _blocks(plan):
    while moves and moves[0] < block.stop:
      _tokens_to_lanes(refs, plan, moves.popleft())
    z, weights = _begin(refs, plan, block, own)
    for i in range(block.stop):
      if moves and i % 2 == 0 and moves[0] < block.stop + len(block):
        _tokens_to_lanes(refs, plan, moves.popleft())
      if i < block.start:
        u = refs.u[pl.ds(i * slots, slots), :]
      else:
        u = _write(refs, plan, i, z[i - block.start], own)
      for k, t in enumerate(block):
        if t > i:
          z[k] = z[k] + weights[k][i : i + 1] * u


def _begin(refs: Scratch, plan: Plan, block: range, rows: _Rows):
  """Returns a block's decayed M w, and the factors of earlier u in its z."""
  slots, tokens = plan.unit.slots, plan.unit.tokens
  z, weights = [], []
  for t in block:
    prev = rows.of("prev", pl.ds(t, 1))
    base = refs.base[pl.ds(t, slots, stride=tokens), :]
    z.append(base * jnp.exp(prev))
    size = -(-max(t, 1) // 8) * 8
    earlier = pl.ds(t * tokens, size)
    # Rows from t on are never read, because their decays may overflow.
    decay = jnp.exp(prev - rows.of("log", pl.ds(0, size)))
    weights.append(refs.coupling[earlier, :] * decay)
    if refs.z is not None:
      refs.coupling[earlier, :] = weights[-1]
  return z, weights


def _write(refs: Scratch, plan: Plan, t: int, z, rows: _Rows):
  """Computes a token's u from its complete z."""
  at = pl.ds(t * plan.unit.slots, plan.unit.slots)
  target = activations.prepare_target(plan.phi, refs.target[at, :])
  rate, eps = (rows.of(name, pl.ds(t, 1)) for name in ("rate", "eps"))
  u = activations.direction(plan.phi, z, target, eps, rate)
  refs.u[at, :] = u
  if refs.z is not None:
    refs.z[at, :] = z
  return u


def send_back(refs: Scratch, plan: Plan, source: jax.Ref) -> None:
  """Converts columns by lane, one token after the other, to units by slot."""
  unit, rows, size = plan.unit, plan.lane_rows, plan.unit.heads
  slots = unit.slots
  for slot in range(0, slots, size):
    found = [
      source[pl.ds(slot + a, unit.tokens, stride=slots), :] for a in range(size)
    ]
    refs.back[pl.ds(slot * rows, size * rows), :] = lanes.from_lanes(found)


def take_back(refs: Scratch, plan: Plan, g: int) -> plan_lib.Pair:
  """Returns a unit's columns by slot, of both passes, after `send_back`."""
  return tuple(
    refs.back[
      pl.ds(plan.lane_row(p, g), plan.unit.slots, stride=plan.lane_rows), :
    ]
    for p in (0, 1)
  )


def solve_transposed(
  refs: Scratch, rows: jax.Ref, d_rows: jax.Ref, plan: Plan
) -> None:
  """Computes dz from the stored du, after `solve`, and the adjoints of g.

  Args:
    refs: Scratch. du is in the place of M w. dz replaces z, and the adjoint of
      targets replaces targets.
    rows: Rows by lane.
    d_rows: Receives the adjoints of the rows.
    plan: Plan of the kernel.
  """
  unit = plan.unit
  slots, tokens = unit.slots, unit.tokens
  _columns_to_lanes(refs, plan)
  own = _Rows(rows, plan)
  for block in reversed(_blocks(plan)):
    du = [refs.base[pl.ds(t, slots, stride=tokens), :] for t in block]
    for s in reversed(range(block.start + 1, tokens)):
      if s >= block.stop:
        dz = refs.z[pl.ds(s * slots, slots), :]
      else:
        dz = _pull(refs, d_rows, plan, s, du[s - block.start], own)
      weights = refs.coupling[pl.ds(s * tokens + block.start, len(block)), :]
      for k, t in enumerate(block):
        if t < s:
          du[k] = du[k] + weights[k : k + 1] * dz
    _pull(refs, d_rows, plan, block.start, du[0], own)


def _pull(refs: Scratch, d_rows, plan: Plan, t: int, du, rows: _Rows):
  """Computes a token's dz from its complete du."""
  at = pl.ds(t * plan.unit.slots, plan.unit.slots)
  z = refs.z[at, :]
  target = activations.prepare_target(plan.phi, refs.target[at, :])
  rate, eps = (rows.of(name, pl.ds(t, 1)) for name in ("rate", "eps"))
  _, pull = plan_lib.direction(plan, z, target, eps, rate)
  dz, d_target, d_rate, d_eps = pull(du)
  found = [-d_rate * rate, plan_lib.sum_slots(dz * z), d_rate]
  if d_eps is not None:
    found.append(d_eps)
  for i, row in enumerate(found):
    d_rows[0, 0, 0, i, t : t + 1, :] = row
  refs.z[at, :] = dz
  # `prepare_target` is a projection, and so its own adjoint.
  refs.target[at, :] = activations.prepare_target(plan.phi, d_target)
  return dz


def send_targets_back(refs: Scratch, plan: Plan) -> None:
  """Converts the adjoint of targets to units, in the place of targets."""
  unit, rows, size = plan.unit, plan.lane_rows, plan.unit.heads
  slots, tokens = unit.slots, unit.tokens
  for token in range(0, tokens, size):
    found = [
      refs.target[pl.ds((token + a) * slots, slots), :] for a in range(size)
    ]
    found = _registers(lanes.from_lanes(found))
    for register, part in enumerate(found):
      at = register, pl.ds(token * rows, size * rows), pl.ds(0, part.shape[1])
      refs.by_token[at] = part


def target_of(refs: Scratch, plan: Plan, g: int) -> jax.Array:
  """Returns the adjoint of a unit's targets, summed over both passes."""
  tokens = plan.unit.tokens
  width = plan.unit.heads * plan.unit.slots
  both = [
    jnp.concatenate(
      [
        refs.by_token[register, pl.ds(row, tokens, stride=plan.lane_rows), :]
        for register in range(refs.by_token.shape[0])
      ],
      axis=1,
    )
    for row in (plan.lane_row(p, g) for p in (0, 1))
  ]
  return (both[0] + both[1])[:, :width]
