"""Trellis under the contract suite."""

import dataclasses

import jax

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


def _state(key, spec, **sizes):
  empty = memory.fresh(trellis, spec, **sizes)
  keys = jax.random.split(key)
  return memory.fresh(
    trellis,
    spec,
    **sizes,
    key_memory=0.5 * jax.random.normal(keys[0], empty.key_memory.shape[1:]),
    value_memory=0.5 * jax.random.normal(keys[1], empty.value_memory.shape[1:]),
  )


def _edges(inputs):
  return memory.edges(inputs, *memory.GATES, *memory.KEYS)


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
