"""Runs a memory under `jax.shard_map`, with batch, heads and time sharded.

If the partitioner sharded the scan over chunks, it would put all-gathers inside
the loop. It cannot partition a Pallas kernel at all. So every memory, the XLA
form included, runs fully manual on its own rows and heads. Rows and heads are
independent, so the memory needs no collective for them. Only where time is
sharded do shards pass the state on (`state_passing`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from memcomp_kernels import contract
from memcomp_kernels.math import solver
from memcomp_kernels.parallel import state_passing, wavefront

Axes = tuple[str, ...]


def shard_chunk(
  chunk: Callable[..., tuple[Any, ...]],
  *,
  batch_axes: Axes,
  head_axes: Axes,
  time_axis: str | None = None,
  mesh: Any = None,
  pass_state: state_passing.Strategy = wavefront.pass_state,
  with_stats: bool = False,
) -> Callable[..., Any]:
  """Wraps a memory's `chunk` for a mesh.

  Args:
    chunk: (state, inputs, *, segment_ids, reset_state) -> (state, outputs). It
      must be the method of an op if `reset_state` may be `FRESH`.
    batch_axes: mesh axes over which batch is sharded.
    head_axes: mesh axes over which heads are sharded.
    time_axis: mesh axis over which time is sharded, if any. A single token is
      on every shard.
    mesh: the mesh; None is the mesh in use (`jax.set_mesh`).
    pass_state: how shards of time pass the state on, see `state_passing`.
    with_stats: whether `chunk` also returns `solver.Stats` `[batch,
      heads]`, or None in their place.

  Returns:
    A function of the same signature. Without a mesh, on one device, and
    without rows or tokens it calls `chunk` directly.

  Raises:
    ValueError: from the returned function, if the mesh axes do not divide
      batch, heads or time.
  """

  @functools.wraps(chunk)
  def sharded(
    state: Any,
    inputs: Any,
    *,
    segment_ids: jax.Array | None = None,
    reset_state: Any = None,
    **keywords: Any,
  ) -> tuple[Any, ...]:
    in_use = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    nothing = 0 in jax.tree.leaves(inputs)[0].shape[:2]
    if in_use.empty or in_use.size == 1 or nothing:
      return chunk(
        state,
        inputs,
        segment_ids=segment_ids,
        reset_state=reset_state,
        **keywords,
      )

    op = getattr(chunk, "__self__", None)
    max_position = keywords.get("max_position")
    contract.check_reset(
      getattr(op, "name", "chunk"), segment_ids, reset_state, max_position
    )
    if reset_state is contract.FRESH:
      if op is None:
        raise TypeError("FRESH asks for the chunk of an op, not a function")
      # The state is made here, for all heads, because `shard_map` cuts arrays.
      reset_state = op.fresh_state(state, keywords["spec"])
    time = jax.tree.leaves(inputs)[0].shape[1]
    shards = in_use.shape.get(time_axis, 1) if time > 1 else 1
    time_axes: Axes = (time_axis,) if time_axis and shards > 1 else ()
    _check_divides(
      in_use, inputs, batch=batch_axes, time=time_axes, heads=head_axes
    )
    if shards > 1 and max_position is not None:
      # This bound holds on every shard, including the last one.
      keywords["max_position"] = max_position + time - time // shards
    function = functools.partial(chunk, **keywords)

    def state_specs(tree):
      heads_too = PartitionSpec(batch_axes, head_axes)
      rows = PartitionSpec(batch_axes)
      return jax.tree.map(lambda x: heads_too if x.ndim > 1 else rows, tree)

    token_spec = PartitionSpec(batch_axes, time_axes, head_axes)

    def local(state, reset_state, inputs, segment_ids):
      if shards == 1:
        return function(
          state, inputs, segment_ids=segment_ids, reset_state=reset_state
        )
      reset = state if reset_state is None else reset_state
      state, outputs, *stats = pass_state(
        function, time_axis, state, inputs, segment_ids, reset
      )
      return state, outputs, *jax.tree.map(lambda x: x[None], stats)

    out_specs = state_specs(state), token_spec
    if with_stats:
      by_shard = (time_axis,) if shards > 1 else ()
      out_specs += (PartitionSpec(*by_shard, batch_axes, head_axes),)
    results: Any = jax.shard_map(
      local,
      mesh=in_use,
      in_specs=(
        state_specs(state),
        state_specs(reset_state),
        jax.tree.map(lambda _: token_spec, inputs),
        PartitionSpec(batch_axes, time_axes),
      ),
      out_specs=out_specs,
      # `state_passing.of_last` ensures replication, and the check does not know
      # Pallas outputs.
      check_vma=False,
    )(state, reset_state, inputs, segment_ids)
    if not with_stats or shards == 1:
      return results
    state, outputs, stats = results
    return state, outputs, None if stats is None else solver.total(stats)

  return sharded


def _check_divides(mesh: Any, inputs: Any, **axes: Axes) -> None:
  """Raises ValueError if the mesh does not divide an axis of the inputs."""
  for path, x in jax.tree.leaves_with_path(inputs):
    for (name, places), size in zip(axes.items(), x.shape, strict=False):
      parts = math.prod(mesh.shape[place] for place in places)
      if size % parts:
        of = jax.tree_util.keystr(path).lstrip(".")
        raise ValueError(
          f"{name}={size} of {of} does not divide over the mesh axes {places}"
          f" = {parts}; change {name}, or leave it on one device"
        )
