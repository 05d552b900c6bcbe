"""What the contract suite needs to know of each memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels.primitives import activations
from memcomp_kernels.trellis import api as trellis


@dataclasses.dataclass(frozen=True)
class Memory:
  """A memory under test.

  Attributes:
    name: of the memory.
    api: its module: init_state, step, chunk, reference, IMPLEMENTATIONS.
    specs: the meanings that are checked, by a short name.
    make_inputs: (key, spec, batch, time, heads, key_dim, value_dim) -> Inputs
      of ordinary size.
    make_state: (key, spec, batch, heads, key_dim, value_dim) -> a state as
      before the first token, with random memories.
    edges: Inputs -> {name: Inputs at an edge of the input's range}.
  """

  name: str
  api: Any
  specs: dict[str, Any]
  make_inputs: Callable[..., Any]
  make_state: Callable[..., Any]
  edges: Callable[[Any], dict[str, Any]]


def unit(x: jax.Array) -> jax.Array:
  """L2-normalises the last axis."""
  return activations.l2_norm(x, 0.0)


def _trellis_inputs(
  key, spec, *, batch, time, heads, key_dim, value_dim, passes=1
):
  keys = iter(jax.random.split(key, 6))

  def normal(*last):
    return jax.random.normal(next(keys), (batch, time, heads, *last))

  return trellis.Inputs(
    query=unit(normal(key_dim)),
    key=unit(normal(key_dim)),
    value=unit(normal(value_dim)),
    target=normal(spec.num_slots),
    log_decay=jax.nn.log_sigmoid(3 + normal(passes)),
    write_rate=0.3 * jax.nn.sigmoid(normal(passes)),
  )


def _trellis_state(key, spec, *, batch, heads, key_dim, value_dim):
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


def _trellis_edges(inputs):
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


def _trellis_specs():
  base = trellis.Spec(num_slots=6, chunk_size=8)

  def spec(**changes):
    return dataclasses.replace(base, **changes)

  specs = {f"chunk-{phi}": spec(phi=phi) for phi in activations.ACTIVATIONS}
  return specs | {
    "chunk-f-l2_silu": spec(read_activation="l2_silu"),
    "chunk-f-softmax": spec(read_activation="softmax"),
    "chunk-no-forget": spec(forget_gate=False),
    "chunk-readout-phi": spec(value_readout_phi=True),
    "chunk-first-order": spec(first_order=True),
    "chunk-1": spec(chunk_size=1),
    "token": spec(gradient_at="token"),
    "token-first-order": spec(gradient_at="token", first_order=True),
  }


MEMORIES = {
  "trellis": Memory(
    name="trellis",
    api=trellis,
    specs=_trellis_specs(),
    make_inputs=_trellis_inputs,
    make_state=_trellis_state,
    edges=_trellis_edges,
  ),
}
