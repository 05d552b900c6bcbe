"""Infini-attention under the contract suite."""

import jax

from memcomp_kernels import infini_attention
from memcomp_kernels.infini_attention import reference
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 6))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  inputs = infini_attention.Inputs(
    query=normal(key_dim),
    key=normal(key_dim),
    value=normal(value_dim),
    read_gate=jax.nn.sigmoid(normal(1)),
  )
  if spec.window_size is not None:
    return inputs
  # As in the paper, the memory has its own queries and keys, without positions.
  return inputs._replace(
    memory_query=normal(key_dim), memory_key=normal(key_dim)
  )


def _state(key, spec, **sizes):
  state = memory.fresh(infini_attention, spec, **sizes)
  keys = jax.random.split(key)
  written = state.association
  written = reference.Association(
    0.5 * jax.random.normal(keys[0], written.memory.shape),
    # Sums of features are never negative.
    0.5 + jax.random.uniform(keys[1], written.normalizer.shape),
  )
  start = None if state.start is None else written
  return state._replace(association=written, start=start)


def _edges(inputs):
  edges = memory.edges(inputs, *memory.KEYS, "zero queries") | {
    "local only": inputs._replace(read_gate=0 * inputs.read_gate),
    "memory only": inputs._replace(read_gate=1 + 0 * inputs.read_gate),
    "keys without features": inputs._replace(key=-1e4 + 0 * inputs.key),
  }
  if inputs.memory_key is None:
    return edges
  return edges | {
    "memory keys without features": inputs._replace(
      memory_key=-1e4 + 0 * inputs.memory_key
    ),
  }


_SPECS = {
  "segments": infini_attention.Spec(segment_size=8),
  "segments-linear-window": infini_attention.Spec(
    segment_size=8, window_size=5, rule="linear"
  ),
  "token": infini_attention.Spec(segment_size=1, window_size=6, eps=0.01),
}

MEMORY = memory.Memory(
  name="infini_attention",
  op=infini_attention,
  specs=_SPECS,
  typical=("segments",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
