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


def _state(key, spec, *, batch, heads, key_dim, value_dim):
  state = delta_rule.init_state(
    spec,
    batch=batch,
    heads=heads,
    key_dim=key_dim,
    value_dim=value_dim,
    dtype=jax.dtypes.canonicalize_dtype(jnp.float64),
  )
  drawn = 0.5 * jax.random.normal(key, state.memory.shape)
  return state._replace(memory=drawn)


def _edges(inputs):
  full = jnp.ones_like
  repeated = jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape)
  twice = 2 * full(inputs.write_rate)
  return {
    "forgets all": inputs._replace(log_decay=-1e4 * full(inputs.log_decay)),
    "forgets nothing": inputs._replace(log_decay=0 * inputs.log_decay),
    "writes nothing": inputs._replace(write_rate=0 * inputs.write_rate),
    "writes all": inputs._replace(write_rate=full(inputs.write_rate)),
    "reflects repeated keys": inputs._replace(write_rate=twice, key=repeated),
    "zero keys": inputs._replace(key=0 * inputs.key),
    "zero queries": inputs._replace(query=0 * inputs.query),
    "zero values": inputs._replace(value=0 * inputs.value),
    "repeated keys": inputs._replace(key=repeated),
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
