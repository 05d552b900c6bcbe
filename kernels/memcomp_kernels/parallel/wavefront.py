"""A wavefront over shards of time: shard s has part p in turn p + s.

The way of handing over (`hand_off`) that does for every memory: parts are rows
and heads, which know nothing of each other.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from memcomp_kernels import derivative
from memcomp_kernels.chunking import chunked
from memcomp_kernels.parallel import state_passing

_PARTS_A_SHARD = 4

# Lanes of a TPU: kernels refuse heads that leave some of them empty.
_FEATURES = 128


class Parts(NamedTuple):
  """Into how many parts rows and heads are cut; part = row part * heads + head.

  Attributes:
    rows: parts of the batch.
    heads: parts of the heads, of whatever number a leaf has.
  """

  rows: int
  heads: int

  @property
  def total(self) -> int:
    """All parts."""
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


def parts_for(rows: int, heads: int, features: int, shards: int) -> Parts:
  """Cuts rows, then heads, until `shards` wait for each other a fifth at most.

  Of `parts + shards - 1` turns each shard works in `parts` (`efficiency`). More
  parts than that would only make each one's matrices smaller.

  Args:
    rows: of a device.
    heads: that can be told apart: the greatest common divisor of what the
      state's and the inputs' leaves have.
    features: of a head; heads are kept together until they have 128.
    shards: of time.
  """
  enough = _PARTS_A_SHARD * (shards - 1)
  choices = [Parts(r, 1) for r in range(1, rows + 1) if rows % r == 0]
  choices += [
    Parts(rows, h)
    for h in range(2, heads + 1)
    if heads % h == 0 and heads // h * features >= _FEATURES
  ]
  return next((p for p in choices if p.total >= enough), choices[-1])


def efficiency(parts: int, shards: int) -> float:
  """The share of turns in which a shard of a wavefront has work, in (0, 1]."""
  return parts / (parts + shards - 1)


def hand_over(
  chunk: state_passing.Chunk,
  axis: str,
  state: Any,
  inputs: Any,
  segment_ids: jax.Array | None,
  reset_state: Any,
) -> tuple[Any, ...]:
  """Hands over part by part: shard s has part p in turn p + s.

  The backward pass runs the other way round, from the states that each shard
  was handed; it computes forward again, so a memory's forward pass runs twice
  a step.

  Args:
    chunk: (state, inputs, *, segment_ids, reset_state) -> (state, outputs) or
      (state, outputs, stats): leaves of states `[batch]` or `[batch, heads,
      ...]`, of inputs and outputs `[batch, time, heads, ...]`, of stats
      `[batch, heads]`.
    axis: of the mesh, that time is sharded over.
    state: before the first shard's first token.
    inputs: of this shard.
    segment_ids: of this shard, or None.
    reset_state: what new segments start from; None is `state`.
  """
  if segment_ids is not None and reset_state is None:
    reset_state = state
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
    """Of (state, inputs, segment_ids, reset_state), or some of them."""
    axes = 1, 2, 2, 1
    return tuple(
      parts.take(x, part, axis) for x, axis in zip(operands, axes, strict=True)
    )

  out_axes = 1, 2, 1

  def empty(operands):
    """Zeros for all that a pass collects."""
    return jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *operands)
    )

  def whose(turn, first):
    """A part to work on, and whether it is this shard's turn."""
    part = turn - first
    here = (part >= 0) & (part < parts.total)
    return jnp.clip(part, 0, parts.total - 1), here

  def keep(tree, new, part, here, head_axis):
    old = parts.take(tree, part, head_axis)
    new = jax.tree.map(lambda n, o: jnp.where(here, n, o), new, old)
    return parts.put(tree, new, part, head_axis)

  def forward(operands):
    # What each part was handed is what the backward pass starts from.
    shard = lax.axis_index(axis)

    def body(carry, turn):
      handed, collected, firsts = carry
      part, here = whose(turn, shard)
      own, *rest = take(operands, part)
      # Where there is nothing to do, the same is done with what is at hand.
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
    # Named, so that whoever recomputes a layer may keep them.
    collected, firsts = jax.tree.map(
      lambda x: checkpoint_name(x, chunked.SAVED), (collected, firsts)
    )
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
    # Later shards' first states were handed on, not taken from `state`.
    state = jax.tree.map(lambda x: jnp.where(shard == 0, x, 0), state)
    return (state, *rest), None

  waved = derivative.custom_vjp(plain, waved_fwd, waved_bwd)
  after, *rest = waved(*_split((state, inputs, segment_ids, reset_state)))
  return state_passing.of_last(after, axis), *rest


def _split(tree: Any) -> tuple[Any, Any]:
  """Floats and the rest, each with None for the other."""

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
