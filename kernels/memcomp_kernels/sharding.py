"""Runs a memory under `jax.shard_map`: batch and heads sharded, time local.

Left to the partitioner, the scan over chunks of a sharded program grew
all-gathers inside its loop; and a Pallas kernel cannot be partitioned at all.
So every memory, the XLA form included, runs fully manual on its own rows and
heads. The memory needs no collective: rows and heads are independent.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

Axes = tuple[str, ...]


def state_spec(leaf: jax.Array, batch: Axes, heads: Axes) -> PartitionSpec:
  """The spec of a State's leaf: `[batch]` or `[batch, heads, ...]`."""
  return PartitionSpec(batch, heads) if leaf.ndim > 1 else PartitionSpec(batch)


def shard_chunk(
  chunk: Callable[..., tuple[Any, jax.Array]],
  *,
  batch_axes: Axes,
  head_axes: Axes,
  with_stats: bool = False,
) -> Callable[..., Any]:
  """Wraps a memory's `chunk` for the mesh in use (`jax.set_mesh`).

  Args:
    chunk: (state, inputs, *, segment_ids, reset_state) -> (state, outputs).
    batch_axes: mesh axes that batch is sharded over.
    head_axes: mesh axes that heads are sharded over.
    with_stats: whether `chunk` also returns a pytree of `[batch, heads]`.

  Returns:
    A function of the same signature; `chunk` itself without a mesh or on one
    device.

  Raises:
    ValueError: from the returned function, where batch or heads do not divide.
  """

  @functools.wraps(chunk)
  def sharded(state, inputs, *, segment_ids=None, reset_state=None, **keywords):
    mesh = jax.sharding.get_abstract_mesh()
    function = functools.partial(chunk, **keywords)
    if mesh.empty or mesh.size == 1:
      return function(
        state, inputs, segment_ids=segment_ids, reset_state=reset_state
      )

    def state_specs(tree):
      return jax.tree.map(lambda x: state_spec(x, batch_axes, head_axes), tree)

    token_spec = PartitionSpec(batch_axes, None, head_axes)

    def positional(state, reset_state, inputs, segment_ids):
      return function(
        state, inputs, segment_ids=segment_ids, reset_state=reset_state
      )

    out_specs = state_specs(state), token_spec
    if with_stats:
      out_specs += (PartitionSpec(batch_axes, head_axes),)
    return jax.shard_map(
      positional,
      in_specs=(
        state_specs(state),
        state_specs(reset_state),
        jax.tree.map(lambda _: token_spec, inputs),
        PartitionSpec(batch_axes),
      ),
      out_specs=out_specs,
      # No value here is replicated over an axis, so there is nothing for the
      # check to find, and it does not know Pallas outputs.
      check_vma=False,
    )(state, reset_state, inputs, segment_ids)

  return sharded
