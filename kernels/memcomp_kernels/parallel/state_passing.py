"""A memory over shards of time: each starts from what the one before found.

Inside `jax.shard_map` with every axis manual, `state` and `reset_state` are the
same on all shards of `axis`, inputs and segment ids are the shard's own tokens.
A way of handing over is a function

  (chunk, axis, state, inputs, segment_ids, reset_state) -> what `chunk` returns

with the state after the last shard's last token, the same on all shards.

`wavefront.hand_over` does for every memory: shards work at the same time on
different rows and heads. `linear` is for memories that are linear in state and
value: they run from nothing and combine, in log2(shards) small messages.
Attention and Tensor Cache have ways of their own, from the same pieces.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.parallel import windows

Chunk = Callable[..., tuple[Any, ...]]
HandOff = Callable[..., tuple[Any, ...]]


def linear(
  chunk: Chunk,
  axis: str,
  state: Any,
  inputs: Any,
  segment_ids: jax.Array | None,
  reset_state: Any,
) -> tuple[Any, ...]:
  """Combines shards of a memory that is linear in its state and in values.

  Every shard runs once, from nothing, with values [v | 0] and memories
  [0 | I] `[key, value + key]`: the second half of what it reads and keeps is
  what it makes of any state it is handed. Twice the memory's work of one shard
  (for value_dim = key_dim), and no waiting.

  Args:
    chunk: see `wavefront.hand_over`; the state has `memory` `[batch, heads,
      key, value]` and `segment_id` alone, the inputs have `value`.
    axis: see there, as what follows.
    state: before the first shard's first token.
    inputs: of this shard.
    segment_ids: of this shard, or None.
    reset_state: what new segments start from; None is `state`.
  """
  key_dim, value_dim = state.memory.shape[-2:]
  before = ids_before(axis, state.segment_id, segment_ids)
  zeros = jnp.zeros_like(state.memory)
  ones = jnp.broadcast_to(
    jnp.eye(key_dim, dtype=zeros.dtype), (*zeros.shape[:-1], key_dim)
  )

  def wide(state, memory, right):
    memory = jnp.concatenate([memory, right], axis=-1)
    return state._replace(memory=memory, segment_id=before)

  if segment_ids is not None:
    reset = state if reset_state is None else reset_state
    reset_state = wide(reset, reset.memory, jnp.zeros_like(ones))
  value = jnp.pad(inputs.value, [(0, 0)] * 3 + [(0, key_dim)])
  after, outputs, *stats = chunk(
    wide(state, zeros, ones),
    inputs._replace(value=value),
    segment_ids=segment_ids,
    reset_state=reset_state,
  )

  def then(first, second):
    """The memory [B | A] of `first` and then `second`, M -> A M + B."""
    found = _matmul(second[..., value_dim:], first)
    return found.at[..., :value_dim].add(second[..., :value_dim])

  nothing = jnp.concatenate([zeros, ones], axis=-1)
  earlier = scan_before(then, axis, after.memory, nothing)
  first = then(state.memory, earlier)
  last = after._replace(memory=then(first, after.memory))
  read = jnp.einsum(
    "bthk,bhkv->bthv",
    outputs[..., value_dim:].astype(first.dtype),
    first,
    precision=lax.Precision.HIGHEST,
  )
  outputs = outputs[..., :value_dim] + read.astype(outputs.dtype)
  return of_last(last, axis), outputs, *stats


def scan_before(
  then: Callable[[Any, Any], Any], axis: str, value: Any, nothing: Any
) -> Any:
  """Combines the values of all shards before this one.

  Args:
    then: associative, (earlier, later) -> both.
    axis: of the mesh.
    value: of this shard.
    nothing: what the first shard gets.
  """
  shards, shard = lax.axis_size(axis), lax.axis_index(axis)
  distance = 1
  while distance < shards:
    both = then(send(value, axis, distance), value)
    value = where(shard >= distance, both, value)
    distance *= 2
  return where(shard > 0, send(value, axis, 1), nothing)


def window_before(
  axis: str,
  state: tuple[Any, jax.Array],
  tokens: Any,
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  reset: tuple[Any, jax.Array],
  *,
  sink_tokens: int,
) -> tuple[Any, jax.Array]:
  """Rows and position of a `window` that each shard comes upon.

  What tokens leave in a window does not depend on earlier ones, so all shards
  find it at once, and windows combine in log2(shards) messages of one each.

  Args:
    axis: of the mesh, that time is sharded over.
    state: rows and position before the first shard's first token.
    tokens: `[batch, time, heads, ...]` leaves, of this shard.
    segment_ids: `[batch, time]`, of this shard, or None.
    segment_id: `[batch]`, of `ids_before`.
    reset: rows and position that new segments start from.
    sink_tokens: rows that the first tokens keep.
  """
  then = functools.partial(windows.then, sink_tokens=sink_tokens)
  rows, position = state
  own = windows.summarize(
    rows, tokens, segment_ids, segment_id, reset, sink_tokens=sink_tokens
  )
  nothing = jax.tree.map(jnp.zeros_like, own)
  start = windows.Summary(rows, position, nothing.restarted)
  found = then(start, scan_before(then, axis, own, nothing))
  return found.rows, found.position


def ids_before(
  axis: str, segment_id: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
  """The segment `[batch]` that each shard's tokens come after.

  Args:
    axis: of the mesh, that time is sharded over.
    segment_id: `[batch]`, before the first shard's first token.
    segment_ids: `[batch, time]`, of this shard, or None.
  """
  if segment_ids is None:
    later = contract.next_segment_id(segment_id)
    return jnp.where(lax.axis_index(axis) > 0, later, segment_id)
  none = jnp.zeros_like(segment_id)
  _, last = contract.segment_starts(segment_ids, none)
  earlier = scan_before(
    lambda first, second: jnp.where(second != 0, second, first),
    axis,
    last,
    none,
  )
  return jnp.where(earlier != 0, earlier, segment_id)


def of_last(tree: Any, axis: str) -> Any:
  """What the last shard has, on all."""
  last = lax.axis_index(axis) == lax.axis_size(axis) - 1
  return jax.tree.map(
    lambda x: lax.psum(jnp.where(last, x, jnp.zeros_like(x)), axis), tree
  )


def send(tree: Any, axis: str, distance: int) -> Any:
  """What the shard `distance` before has; zeros where there is none."""
  shards = lax.axis_size(axis)
  pairs = [
    (i, i + distance) for i in range(shards) if 0 <= i + distance < shards
  ]
  return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def where(condition: jax.Array, x: Any, y: Any) -> Any:
  """Selects one of two equal pytrees."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
