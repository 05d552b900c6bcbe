"""Softmax attention under the contract suite."""

import jax
import jax.numpy as jnp

from memcomp_kernels import softmax_attention
from memcomp_kernels.testing import memory

# Size of full attention's state, more than the suite's longest sequence.
_LENGTH = 128

# Number of tokens that windows with sinks hold before the first token. A
# segment that starts also finds them there.
_PREFIX = 3


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = jax.random.split(key, 3)
  shape = batch, time, heads
  query = 2 * jax.random.normal(keys[0], (*shape, key_dim))
  # It may be any function of the token; here it is another random vector.
  sinks = spec is not None and spec.sink_tokens
  return softmax_attention.Inputs(
    query=query,
    key=jax.random.normal(keys[1], (*shape, key_dim)),
    value=memory.unit(jax.random.normal(keys[2], (*shape, value_dim))),
    sink_query=query[..., ::-1] if sinks else None,
  )


def _state(key, spec, **sizes):
  state = memory.fresh(softmax_attention, spec, **sizes, length=_LENGTH)
  if not spec.sink_tokens:
    return state
  prefix = _inputs(key, spec, time=_PREFIX, **sizes)
  state, _ = softmax_attention.reference(state, prefix, spec=spec)
  return state._replace(segment_id=jnp.zeros_like(state.segment_id))


def _edges(inputs):
  return memory.edges(inputs, *memory.KEYS) | {
    "huge scores": inputs._replace(query=1e4 * inputs.query),
  }


MEMORY = memory.Memory(
  name="softmax_attention",
  op=softmax_attention,
  specs={
    "window-sinks": softmax_attention.Spec(window_size=6, sink_tokens=2),
    "full": softmax_attention.Spec(),
    "window": softmax_attention.Spec(window_size=5, scale=1.0),
    "block-window": softmax_attention.Spec(window_size=8, chunk_size=4),
  },
  typical=("window-sinks",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
