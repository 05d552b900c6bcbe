"""The two-pass delta rule under the contract suite."""

import dataclasses

import jax
import jax.numpy as jnp

from memcomp_kernels import two_pass_delta
from memcomp_kernels.testing import memory

# Specs with this eps are checked with two rates and tokens that only read.
_ALL_INPUTS = 0.5


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 8))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  every = spec.code_eps == _ALL_INPUTS
  # Codes have length sqrt(key_dim).
  rate = 0.2 * jax.nn.sigmoid(normal(2 if every else 1))
  return two_pass_delta.Inputs(
    query=memory.unit(normal(key_dim + 1)),
    source=memory.unit(normal(key_dim + 1)),
    key=normal(key_dim),
    value=normal(value_dim),
    log_decay=jax.nn.log_sigmoid(3 + normal(1)),
    write_rate=rate,
    active=jnp.where(normal(1) > -0.5, 1.0, 0.0) if every else None,
  )


def _state(key, spec, *, heads, key_dim, value_dim, **sizes):
  keys = jax.random.split(key)
  return memory.fresh(
    two_pass_delta,
    spec,
    **sizes,
    heads=heads,
    key_dim=key_dim,
    value_dim=value_dim,
    source_dim=key_dim + 1,
    key_memory=jax.random.normal(keys[0], (heads, key_dim + 1, key_dim)),
    value_memory=jax.random.normal(keys[1], (heads, key_dim, value_dim)),
  )


def _edges(inputs):
  repeated = jnp.broadcast_to(inputs.source[:, :1], inputs.source.shape)
  return memory.edges(inputs, *memory.GATES) | {
    "zero sources": inputs._replace(source=0 * inputs.source),
    "zero keys and values": inputs._replace(
      key=0 * inputs.key, value=0 * inputs.value
    ),
    "repeated sources": inputs._replace(source=repeated),
  }


_BASE = two_pass_delta.Spec(code_eps=0.1)

_SPECS = {
  "write-first": _BASE,
  "read-first": dataclasses.replace(_BASE, read_first=True),
  # This weight decay makes some decays zero.
  "weight-decay": two_pass_delta.Spec(
    key_weight_decay=0.5, value_weight_decay=8.0, code_eps=_ALL_INPUTS
  ),
}

MEMORY = memory.Memory(
  name="two_pass_delta",
  op=two_pass_delta,
  specs=_SPECS,
  typical=("write-first",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
