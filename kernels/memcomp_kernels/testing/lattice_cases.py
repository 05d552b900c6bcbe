"""Lattice under the contract suite."""

import dataclasses

import jax
import jax.numpy as jnp

from memcomp_kernels import lattice
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  del key_dim  # the code is as wide as there are slots
  keys = iter(jax.random.split(key, 5))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  return lattice.Inputs(
    query=memory.unit(normal(spec.num_slots)),
    key=memory.unit(normal(spec.num_slots)),
    value=memory.unit(normal(value_dim)),
    log_decay=jax.nn.log_sigmoid(3 + normal(1)),
    write_rate=jax.nn.sigmoid(normal(1)),
  )


def _state(key, spec, **sizes):
  shape = sizes["heads"], sizes["value_dim"], spec.num_slots
  return memory.fresh(
    lattice,
    spec,
    **sizes,
    memory=jax.random.normal(key, shape),
  )


def _edges(inputs):
  full = jnp.ones_like
  return memory.edges(inputs, *memory.GATES, *memory.KEYS) | {
    "forgets all and writes nothing": inputs._replace(
      log_decay=-1e4 * full(inputs.log_decay), write_rate=0 * inputs.write_rate
    ),
  }


def _specs():
  base = lattice.Spec(num_slots=6, chunk_size=8)

  def spec(**changes):
    return dataclasses.replace(base, **changes)

  return {
    "chunk-decoding": base,
    "chunk-encoding": spec(objective="encoding"),
    "chunk-similarity": spec(objective="similarity"),
    "chunk-orthogonal": spec(update="orthogonal"),
    "chunk-delta": spec(update="delta", forget_gate=False),
    "token": spec(gradient_at="token"),
    "token-encoding": spec(
      gradient_at="token", objective="encoding", update="orthogonal"
    ),
    "token-similarity": spec(
      gradient_at="token", objective="similarity", update="delta"
    ),
    "token-sparse": spec(gradient_at="token", sparsity=0.1),
    # The last Spec is also checked in pieces: rates are summed across calls.
    "chunk-long-sparse": spec(sparsity=0.03, chunk_size=24),
  }


MEMORY = memory.Memory(
  name="lattice",
  op=lattice,
  specs=_specs(),
  typical=("chunk-decoding", "token"),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
  composed=("chunk-encoding",),
)
