"""A wavefront over shards of time: shard s works on part p in turn p + s.

This strategy of `state_passing` works for every memory. The parts are rows and
heads, which are independent of each other.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memcomp_kernels import derivative
from memcomp_kernels.parallel import state_passing

_PARTS_PER_SHARD = 4

# Lanes of a TPU. Kernels reject heads that leave some of them empty.
_FEATURES = 128


class Partition(NamedTuple):
  """Numbers of parts of rows and heads; part = row part * heads + head part.

  Attributes:
    rows: number of parts of the batch.
    heads: number of parts of the heads, whatever number of heads a leaf has.
  """

  rows: int
  heads: int

  @property
  def total(self) -> int:
    """Number of all parts."""
    return self.rows * self.heads

  def take(self, tree: Any, part: jax.Array | int, head_axis: int) -> Any:
    """Returns a part of every leaf; leaves without heads are `[batch]`."""

    def one(x):
      for axis, start, size in self._places(x.shape, part, head_axis):
        x = lax.dynamic_slice_in_dim(x, start, size, axis)
      return x

    return jax.tree.map(one, tree)

  def put(
    self, tree: Any, new: Any, part: jax.Array | int, head_axis: int
  ) -> Any:
    """Replaces a part of every leaf."""

    def one(x, new):
      starts = [0] * x.ndim
      for axis, start, _ in self._places(x.shape, part, head_axis):
        starts[axis] = start
      return lax.dynamic_update_slice(x, new.astype(x.dtype), starts)

    return jax.tree.map(one, tree, new)

  def _places(self, shape, part, head_axis):
    size = shape[0] // self.rows
    yield 0, part // self.heads * size, size
    if len(shape) > head_axis:
      size = shape[head_axis] // self.heads
      yield head_axis, part % self.heads * size, size


def parts_for(rows: int, heads: int, features: int, shards: int) -> Partition:
  """Cuts rows, then heads, until at most 20 % of the turns are idle.

  A shard works in `parts` of `parts + shards - 1` turns. More
  parts than needed would only make each part's matrices smaller.

  Args:
    rows: rows per device.
    heads: number of heads that can be separated, which is the greatest common
      divisor of the numbers that the leaves of state and inputs have.
    features: features per head. Heads are kept together until they have 128
      features.
    shards: number of shards of time.
  """
  enough = _PARTS_PER_SHARD * (shards - 1)
  choices = [Partition(r, 1) for r in range(1, rows + 1) if rows % r == 0]
  choices += [
    Partition(rows, h)
    for h in range(2, heads + 1)
    if heads % h == 0 and heads // h * features >= _FEATURES
  ]
  return next((p for p in choices if p.total >= enough), choices[-1])


def pass_state(
  chunk: state_passing.Chunk,
  axis: str,
  state: Any,
  inputs: Any,
  segment_ids: jax.Array | None,
  reset_state: Any,
) -> tuple[Any, ...]:
  """Passes the state on part by part: shard s works on part p in turn p + s.

  The backward pass runs in the opposite direction, from the states that each
  shard received. It computes the forward pass again, so a memory's forward pass
  runs twice per training step.

  Args:
    chunk: (state, inputs, *, segment_ids, reset_state) -> (state, outputs) or
      (state, outputs, stats). Leaves of states are `[batch]` or `[batch, heads,
      ...]`, of inputs and outputs `[batch, time, heads, ...]`, of stats
      `[batch, heads]`.
    axis: mesh axis over which time is sharded.
    state: the state before the first shard's first token.
    inputs: inputs of this shard.
    segment_ids: segment ids of this shard, or None.
    reset_state: the state that new segments start from.
  """
  if segment_ids is None:
    reset_state = None
  shards = lax.axis_size(axis)
  heads = np.gcd.reduce(
    [x.shape[1] for x in jax.tree.leaves(state) if x.ndim > 1]
    + [x.shape[2] for x in jax.tree.leaves(inputs)]
  )
  rows, *_, features = inputs.value.shape
  parts = parts_for(rows, int(heads), features, shards)
  turns = parts.total + shards - 1

  def run(state, inputs, segment_ids, reset_state):
    return chunk(
      state, inputs, segment_ids=segment_ids, reset_state=reset_state
    )

  def take(operands, part):
    """Takes a part of (state, inputs, segment_ids, reset_state)."""
    axes = 1, 2, 2, 1
    return tuple(
      parts.take(x, part, axis) for x, axis in zip(operands, axes, strict=True)
    )

  out_axes = 1, 2, 1

  def empty(operands):
    """Returns zeros for everything that a pass collects."""
    return jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *operands)
    )

  def whose(turn, first):
    """Returns a part to work on, and whether this shard has work."""
    part = turn - first
    here = (part >= 0) & (part < parts.total)
    return jnp.clip(part, 0, parts.total - 1), here

  def keep(tree, new, part, here, head_axis):
    old = parts.take(tree, part, head_axis)
    new = jax.tree.map(lambda n, o: jnp.where(here, n, o), new, old)
    return parts.put(tree, new, part, head_axis)

  def forward(operands):
    # The backward pass starts from the states that were received for each part.
    shard = lax.axis_index(axis)

    def body(carry, turn):
      handed, collected, firsts = carry
      part, here = whose(turn, shard)
      own, *rest = take(operands, part)
      # A shard without work does the same computation with its own state.
      handed = state_passing.where(here & (shard > 0), handed, own)
      results = run(handed, *rest)
      collected = tuple(
        keep(tree, new, part, here, axis)
        for tree, new, axis in zip(collected, results, out_axes, strict=False)
      )
      firsts = keep(firsts, handed, part, here, 1)
      return (state_passing.send(results[0], axis, 1), collected, firsts), None

    state = operands[0]
    start = parts.take(state, 0, 1), empty(operands), state
    (_, collected, firsts), _ = lax.scan(body, start, jnp.arange(turns))
    return collected, firsts

  def plain(floats, others):
    return forward(_join(floats, others))[0]

  def waved_fwd(floats, others):
    collected, firsts = forward(_join(floats, others))
    collected, firsts = derivative.saved((collected, firsts))
    return collected, (floats, others, firsts)

  def waved_bwd(saved, cotangents):
    floats, others, firsts = saved
    operands = firsts, *_join(floats, others)[1:]
    cotangents, _ = _split(cotangents)
    shard = lax.axis_index(axis)

    def body(carry, turn):
      handed, collected = carry
      part, here = whose(turn, shards - 1 - shard)
      own = tuple(
        parts.take(x, part, axis)
        for x, axis in zip(cotangents, out_axes, strict=False)
      )
      after = state_passing.where(here & (shard < shards - 1), handed, own[0])
      floats, others = _split(take(operands, part))

      def results(floats):
        return _split(run(*_join(floats, others)))[0]

      _, pull = jax.vjp(results, floats)
      (found,) = pull((after, *own[1:]))
      collected = tuple(
        keep(tree, new, part, here, axis)
        for tree, new, axis in zip(collected, found, (1, 2, 2, 1), strict=True)
      )
      return (state_passing.send(found[0], axis, -1), collected), None

    zeros = jax.tree.map(jnp.zeros_like, floats)
    start = parts.take(zeros[0], 0, 1), zeros
    (_, (state, *rest)), _ = lax.scan(body, start, jnp.arange(turns))
    # Later shards received their first states; they did not read `state`.
    state = jax.tree.map(lambda x: jnp.where(shard == 0, x, 0), state)
    return (state, *rest), None

  waved = derivative.custom_vjp(plain, waved_fwd, waved_bwd)
  after, *rest = waved(*_split((state, inputs, segment_ids, reset_state)))
  return state_passing.of_last(after, axis), *rest


def _split(tree: Any) -> tuple[Any, Any]:
  """Splits into floats and the rest, each with None in place of the other."""

  def only(wanted):
    return jax.tree.map(
      lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) == wanted else None,
      tree,
    )

  return only(True), only(False)


def _join(floats: Any, others: Any) -> Any:
  """Undoes `_split`."""
  return jax.tree.map(
    lambda f, o: o if f is None else f,
    floats,
    others,
    is_leaf=lambda x: x is None,
  )
