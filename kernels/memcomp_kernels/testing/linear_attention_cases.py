"""Linear attention under the contract suite."""

import jax

from memcomp_kernels import linear_attention
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 4))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  inputs = linear_attention.Inputs(
    query=normal(key_dim), key=normal(key_dim), value=normal(value_dim)
  )
  if not spec.forget_gate:
    return inputs
  return inputs._replace(log_decay=jax.nn.log_sigmoid(3 + normal(1)))


def _state(key, spec, **sizes):
  state = memory.fresh(linear_attention, spec, **sizes)
  keys = jax.random.split(key)
  drawn = 0.5 * jax.random.normal(keys[0], state.memory.shape)
  state = state._replace(memory=drawn)
  if state.normalizer is None:
    return state
  # Sums of features are never negative.
  drawn = jax.random.uniform(keys[1], state.normalizer.shape)
  return state._replace(normalizer=0.5 + drawn)


def _edges(inputs):
  edges = memory.edges(inputs, *memory.KEYS, "zero queries") | {
    "keys without features": inputs._replace(key=-1e4 + 0 * inputs.key),
    "queries without features": inputs._replace(query=-1e4 + 0 * inputs.query),
  }
  if inputs.log_decay is None:
    return edges
  return edges | memory.edges(inputs, "forgets all", "forgets nothing")


_SPECS = {
  "decayed": linear_attention.Spec(forget_gate=True),
  "plain": linear_attention.Spec(feature_map="softmax", eps=0.01),
  "no-sum": linear_attention.Spec(feature_map="identity", normalize=False),
}

MEMORY = memory.Memory(
  name="linear_attention",
  op=linear_attention,
  specs=_SPECS,
  typical=("decayed",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
