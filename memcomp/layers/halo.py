"""Passes the last few tokens between time shards, for local layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from memcomp import sharding
from memcomp_kernels import contract
from memcomp_kernels.parallel import state_passing

Local = Callable[..., tuple[jax.Array, jax.Array]]


class _Tail(NamedTuple):
  """The last tokens of a shard.

  Attributes:
    taps: `[batch, width, channels]`, newest last, zeros before the first token.
    tokens: int32 `[batch]`, number of valid tokens in the shard.
    restarted: bool `[batch]`, whether a segment started in the shard.
  """

  taps: jax.Array
  tokens: jax.Array
  restarted: jax.Array


def run_sharded(
  local: Local,
  x: jax.Array,
  taps: jax.Array,
  parameters: Any,
  segment_ids: jax.Array | None,
  segment_id: jax.Array | None,
  rules: sharding.Rules,
) -> tuple[jax.Array, jax.Array]:
  """Runs `local` on every time shard, or directly if time is not sharded.

  Every shard gets the taps left by the tokens before it. They come from its
  neighbour, or from earlier shards if rows have padding.

  Args:
    local: (x, taps, parameters, segment_ids, segment_id) -> (y, taps).
    x: `[batch, time, channels]`.
    taps: `[batch, width, channels]`, the previous tokens, newest last.
    parameters: pytree of `[..., channels]` arrays.
    segment_ids: `[batch, time]`, or None.
    segment_id: `[batch]`, segment of the previous token; may be None without
      segment_ids.
    rules: sharding of batch, time and heads.
  """
  if rules.shards("time") == 1 or x.shape[1] == 1:
    return local(x, taps, parameters, segment_ids, segment_id)
  (axis,) = rules.axes("time")
  rules.check_divides(x, "batch", "time", None)
  if segment_id is None:
    segment_id = jnp.zeros(x.shape[0], jnp.int32)

  def on_shard(x, taps, parameters, segment_ids, segment_id):
    before = state_passing.ids_before(axis, segment_id, segment_ids)
    nothing = _Tail(
      jnp.zeros_like(taps), jnp.zeros_like(before), before != before
    )
    # XLA removes the computation of the unused outputs.
    _, own = local(x, nothing.taps, parameters, segment_ids, before)
    tail = _tail(own, x.shape[1], segment_ids, before)
    earlier = state_passing.scan_before(_concatenate, axis, tail, nothing)
    handed = _concatenate(nothing._replace(taps=taps), earlier).taps
    y, taps = local(x, handed, parameters, segment_ids, before)
    return y, state_passing.of_last(taps, axis)

  # Channels stay sharded by heads if they divide evenly.
  divides = x.shape[-1] % rules.shards("heads") == 0
  channels = rules.axes("heads") if divides else ()
  batch = rules.axes("batch")
  own = PartitionSpec(batch, axis, channels)
  state = PartitionSpec(batch, None, channels)
  return jax.shard_map(
    on_shard,
    mesh=rules.active_mesh(),
    in_specs=(
      own,
      state,
      jax.tree.map(
        lambda p: PartitionSpec(*[None] * (p.ndim - 1), channels), parameters
      ),
      PartitionSpec(batch, axis),
      PartitionSpec(batch),
    ),
    out_specs=(own, state),
    check_vma=False,
  )(x, taps, parameters, segment_ids, segment_id)


def _tail(taps, time, segment_ids, before) -> _Tail:
  if segment_ids is None:
    tokens = jnp.full_like(before, time)
    return _Tail(taps, tokens, before != before)
  starts, _ = contract.segment_starts(segment_ids, before)
  tokens = jnp.sum(segment_ids != 0, axis=1, dtype=jnp.int32)
  return _Tail(taps, tokens, jnp.any(starts, axis=1))


def _concatenate(first: _Tail, second: _Tail) -> _Tail:
  """The last tokens of two adjacent shards; associative."""
  width = first.taps.shape[1]
  place = jnp.arange(width) + second.tokens[:, None]
  # Tokens of `first` remain unless the tokens of `second` push them out.
  left = (place < width) & ~second.restarted[:, None]
  shifted = jnp.take_along_axis(
    first.taps, jnp.minimum(place, width - 1)[..., None], axis=1
  )
  return _Tail(
    jnp.where(left[..., None], shifted, second.taps),
    first.tokens + second.tokens,
    first.restarted | second.restarted,
  )
