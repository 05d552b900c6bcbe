"""Tensor Cache under the contract suite."""

import dataclasses

import jax
import jax.numpy as jnp

from memcomp_kernels import tensor_cache
from memcomp_kernels.testing import memory

# Number of tokens that windows with sinks hold before the first token. A
# segment that starts also finds them there, so it starts inside a chunk.
_PREFIX = 3


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 8))
  if spec.rule == "wedge":
    value_dim = key_dim

  def normal(*last):
    return jax.random.normal(next(keys), (batch, time, heads, *last))

  inputs = tensor_cache.Inputs(
    query=normal(key_dim),
    key=memory.unit(normal(key_dim)),
    value=normal(value_dim),
    log_decay=jax.nn.log_sigmoid(3 + normal(spec.timescales)),
    write_rate=0.8 * jax.nn.sigmoid(normal(spec.timescales)),
  )
  if spec.num_slots > 1:
    # Routes are sharp but not one-hot, because the memory accepts any number.
    inputs = inputs._replace(
      write_route=jax.nn.softmax(4 * normal(spec.num_slots)),
      read_route=jax.nn.softmax(normal(spec.num_slots)),
    )
  if spec.timescales > 1:
    inputs = inputs._replace(read_mix=jax.nn.sigmoid(normal(1)))
  return inputs


def _state(key, spec, **sizes):
  if spec.rule == "wedge":
    sizes["value_dim"] = sizes["key_dim"]
  state = memory.fresh(tensor_cache, spec, **sizes)
  leaves, tree = jax.tree.flatten(state.memories)
  keys = jax.random.split(key, len(leaves))
  memories = jax.tree.unflatten(
    tree,
    [
      0.5 * jax.random.normal(k, x.shape)
      for k, x in zip(keys, leaves, strict=True)
    ],
  )
  starts = None if state.starts is None else memories
  state = state._replace(memories=memories, starts=starts)
  if not spec.sink_tokens:
    return state
  prefix = _inputs(key, spec, time=_PREFIX, **sizes)
  state, _ = tensor_cache.reference(state, prefix, spec=spec)
  return state._replace(segment_id=jnp.zeros_like(state.segment_id))


def _edges(inputs):
  edges = memory.edges(inputs, *memory.GATES, *memory.KEYS, "zero queries")
  if inputs.write_route is not None:
    route = jax.nn.one_hot(0, inputs.write_route.shape[-1])
    route = jnp.broadcast_to(route, inputs.write_route.shape)
    edges["one slot"] = inputs._replace(write_route=route)
    edges["one slot forgets all"] = edges["forgets all"]._replace(
      write_route=route
    )
  return edges


def _specs():
  by_eviction = tensor_cache.Spec(window_size=6, write_population="evicted")
  by_chunk = tensor_cache.Spec(window_size=9, chunk_size=8)

  def evicted(**changes):
    return dataclasses.replace(by_eviction, **changes)

  def every(**changes):
    return dataclasses.replace(by_chunk, **changes)

  return {
    "evicted-outer": evicted(read_after_write=True, read_norm=True),
    "evicted-delta": evicted(rule="delta", unit_keys=True),
    "evicted-wedge": evicted(rule="wedge", sink_tokens=1),
    "evicted-timescales": evicted(
      timescales=2, num_slots=2, route_by="query", value_scale=0.5
    ),
    "evicted-slots": evicted(num_slots=3, sink_tokens=2),
    "all-outer": every(unit_queries=True),
    "all-delta": every(
      rule="delta", window_size=4, sink_tokens=1, chunk_size=5
    ),
    "all-mean": every(
      chunk_mean=True,
      timescales=2,
      window_size=3,
      chunk_size=7,
      sink_tokens=1,
    ),
    "all-slots-delta-timescales": every(
      rule="delta", num_slots=2, timescales=2, read_norm=True
    ),
  }


MEMORY = memory.Memory(
  name="tensor_cache",
  op=tensor_cache,
  specs=_specs(),
  typical=("evicted-delta", "all-outer"),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
  composed=("all-delta", "evicted-timescales"),
)
