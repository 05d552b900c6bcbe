"""The delta rule under the contract suite."""

import jax
import jax.numpy as jnp

from memcomp_kernels import delta_rule
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  del spec
  keys = iter(jax.random.split(key, 5))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  return delta_rule.Inputs(
    query=normal(key_dim),
    key=memory.unit(normal(key_dim)),
    value=normal(value_dim),
    log_decay=jax.nn.log_sigmoid(3 + normal(1)),
    # Rates up to 2 allow transitions with negative eigenvalues.
    write_rate=2 * jax.nn.sigmoid(normal(1)),
  )


def _state(key, spec, **sizes):
  state = memory.fresh(delta_rule, spec, **sizes)
  drawn = 0.5 * jax.random.normal(key, state.memory.shape)
  return state._replace(memory=drawn)


def _edges(inputs):
  full = jnp.ones_like
  repeated = jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape)
  twice = 2 * full(inputs.write_rate)
  return memory.edges(inputs, *memory.GATES, *memory.KEYS, "zero queries") | {
    "reflects repeated keys": inputs._replace(write_rate=twice, key=repeated),
  }


_SPECS = {
  "gated": delta_rule.Spec(),
  "not-gated": delta_rule.Spec(forget_gate=False, scale=0.7),
}

MEMORY = memory.Memory(
  name="delta_rule",
  op=delta_rule,
  specs=_SPECS,
  typical=("gated",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
