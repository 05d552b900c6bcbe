"""State space duality under the contract suite."""

import jax
import jax.numpy as jnp

from memcomp_kernels import state_space_duality
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 6))

  def normal(heads, last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  groups = heads // spec.heads_per_group
  inputs = state_space_duality.Inputs(
    query=normal(groups, key_dim),
    key=normal(groups, key_dim),
    value=normal(heads, value_dim),
    log_decay=jax.nn.log_sigmoid(3 + normal(heads, 1)),
    write_rate=jax.nn.softplus(normal(heads, 1) - 1),
  )
  return inputs._replace(skip=normal(heads, 1)) if spec.skip else inputs


def _state(key, spec, *, batch, heads, key_dim, value_dim):
  state = state_space_duality.init_state(
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
  full = jnp.ones_like(inputs.log_decay)
  repeated = jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape)
  return {
    "forgets all": inputs._replace(log_decay=-1e4 * full),
    "forgets nothing": inputs._replace(log_decay=0 * full),
    "writes nothing": inputs._replace(write_rate=0 * full),
    "writes all": inputs._replace(write_rate=full),
    "zero keys": inputs._replace(key=0 * inputs.key),
    "zero queries": inputs._replace(query=0 * inputs.query),
    "zero values": inputs._replace(value=0 * inputs.value),
    "repeated keys": inputs._replace(key=repeated),
  }


_SPECS = {
  # The first Spec is also checked over a mesh, so each head has its own group.
  "own": state_space_duality.Spec(skip=False),
  "shared": state_space_duality.Spec(heads_per_group=2),
}

MEMORY = memory.Memory(
  name="state_space_duality",
  op=state_space_duality,
  specs=_SPECS,
  typical=("shared",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
