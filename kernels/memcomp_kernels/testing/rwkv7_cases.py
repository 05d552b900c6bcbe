"""RWKV-7 under the contract suite."""

import jax
import jax.numpy as jnp

from memcomp_kernels import rwkv7
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  del spec
  keys = iter(jax.random.split(key, 6))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  return rwkv7.Inputs(
    query=normal(key_dim),
    key=normal(key_dim),
    value=normal(value_dim),
    removal_key=memory.unit(normal(key_dim)),
    log_decay=-0.6 * jax.nn.sigmoid(2 * normal(key_dim)),
    write_rate=jax.nn.sigmoid(2 * normal(key_dim)),
  )


def _state(key, spec, **sizes):
  empty = memory.fresh(rwkv7, spec, **sizes)
  return memory.fresh(
    rwkv7,
    spec,
    **sizes,
    memory=jax.random.normal(key, empty.memory.shape[1:]),
  )


def _edges(inputs):
  full = jnp.ones_like(inputs.log_decay)
  some = full.at[:, ::2].set(0)
  repeated = inputs.removal_key[:, :1]
  return {
    "forgets all": inputs._replace(log_decay=-1e4 * full),
    "forgets all now and then": inputs._replace(log_decay=-1e4 * some),
    "forgets nothing": inputs._replace(log_decay=0 * full),
    "removes nothing": inputs._replace(write_rate=0 * full),
    "removes all": inputs._replace(write_rate=full),
    "zero keys": inputs._replace(key=0 * inputs.key, removal_key=0 * full),
    "zero values": inputs._replace(value=0 * inputs.value),
    "repeated keys": inputs._replace(
      removal_key=jnp.broadcast_to(repeated, inputs.removal_key.shape)
    ),
  }


_SPECS = {
  "released": rwkv7.Spec(),
  "scaled": rwkv7.Spec(scale=None),
}

MEMORY = memory.Memory(
  name="rwkv7",
  op=rwkv7,
  specs=_SPECS,
  typical=("released",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
