"""Trellis under the contract suite."""

import dataclasses

import jax
import jax.numpy as jnp

from memcomp_kernels import trellis
from memcomp_kernels.math import activations
from memcomp_kernels.testing import memory

# Specs with this phi_eps are checked with inputs that have log_phi_eps.
_EPS_IN_INPUTS = 7.0


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim, passes=1):
  keys = iter(jax.random.split(key, 7))

  def normal(*last):
    return jax.random.normal(next(keys), (batch, time, heads, *last))

  return trellis.Inputs(
    query=memory.unit(normal(key_dim)),
    key=memory.unit(normal(key_dim)),
    value=memory.unit(normal(value_dim)),
    target=normal(spec.num_slots),
    log_decay=jax.nn.log_sigmoid(3 + normal(passes)),
    write_rate=0.3 * jax.nn.sigmoid(normal(passes)),
    log_phi_eps=normal(1) if spec.phi_eps == _EPS_IN_INPUTS else None,
  )


def _state(key, spec, *, batch, heads, key_dim, value_dim):
  keys = jax.random.split(key)
  shape = heads, spec.num_slots
  return trellis.init_state(
    spec,
    batch=batch,
    heads=heads,
    key_dim=key_dim,
    value_dim=value_dim,
    dtype=jax.dtypes.canonicalize_dtype(jnp.float64),
    key_memory=0.5 * jax.random.normal(keys[0], (*shape, key_dim)),
    value_memory=0.5 * jax.random.normal(keys[1], (*shape, value_dim)),
  )


def _edges(inputs):
  full = jnp.ones_like
  repeated = jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape)
  return {
    "forgets all": inputs._replace(log_decay=-1e4 * full(inputs.log_decay)),
    "forgets nothing": inputs._replace(log_decay=0 * inputs.log_decay),
    "writes nothing": inputs._replace(write_rate=0 * inputs.write_rate),
    "writes all": inputs._replace(write_rate=full(inputs.write_rate)),
    "zero keys": inputs._replace(key=0 * inputs.key),
    "zero values": inputs._replace(value=0 * inputs.value),
    "repeated keys": inputs._replace(key=repeated),
  }


def _specs():
  base = trellis.Spec(num_slots=6, chunk_size=8)

  def spec(**changes):
    return dataclasses.replace(base, **changes)

  specs = {f"chunk-{phi}": spec(phi=phi) for phi in activations.ACTIVATIONS}
  return specs | {
    "chunk-f-l2_silu": spec(read_activation="l2_silu"),
    "chunk-f-softmax": spec(read_activation="softmax"),
    "chunk-no-forget": spec(forget_gate=False),
    "chunk-readout-phi": spec(value_readout_phi=True, phi_eps=_EPS_IN_INPUTS),
    "chunk-first-order": spec(first_order=True),
    "chunk-1": spec(chunk_size=1),
    "token": spec(gradient_at="token"),
    "token-first-order": spec(gradient_at="token", first_order=True),
    # The last Spec is also checked in pieces, with states in mid-sequence.
    "token-eps": spec(
      gradient_at="token", phi="l2_silu", phi_eps=_EPS_IN_INPUTS
    ),
  }


def _smooth():
  return tuple(name for name in _specs() if "first-order" not in name)


MEMORY = memory.Memory(
  name="trellis",
  op=trellis,
  specs=_specs(),
  typical=("chunk-ln_silu", "token"),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
  smooth=_smooth(),
  composed=("chunk-l2", "chunk-f-l2_silu"),
)
