"""Small Tensor Caches, for the tests of its definition and options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import programs

from memcomp_kernels import tensor_cache
from memcomp_kernels.testing import memories

COMPILED = programs.of(tensor_cache)
MEMORY = memories.MEMORIES["tensor_cache"]
TIME = 13


def scalars(*values):
  """A `[1, time, 1, 1]` array."""
  return jnp.array(values, jnp.float64)[None, :, None, None]


def fresh(spec, key_dim=1, value_dim=1, heads=1, batch=1):
  return tensor_cache.init_state(
    spec,
    batch=batch,
    heads=heads,
    key_dim=key_dim,
    value_dim=value_dim,
    dtype=jnp.float64,
  )


def holding(spec, memory):
  """A fresh state of scalars whose memory is `memory`."""
  state = fresh(spec)
  filled = jax.tree.map(lambda x: x + memory, state.memories)
  starts = None if state.starts is None else filled
  return state._replace(memories=filled, starts=starts)


def by_hand(keys, values, decay=0.5, rate=1.0, query=1.0):
  k, v = scalars(*keys), scalars(*values)
  full = jnp.ones_like(k)
  return tensor_cache.Inputs(
    query * full, k, v, jnp.log(decay * full), rate * full
  )


def drawn(spec, time=TIME, seed=0, dim=4):
  """Random inputs of one row and one head."""
  sizes = {"batch": 1, "heads": 1, "key_dim": dim, "value_dim": dim}
  return MEMORY.make_inputs(jax.random.key(seed), spec, time=time, **sizes)


def reads(spec, inputs, state=None):
  """What the memory adds, `[time, value]`, and the final memory."""
  k, v = inputs.key.shape[-1], inputs.value.shape[-1]
  state = fresh(spec, k, v) if state is None else state
  state, y = COMPILED.reference(state, inputs, spec=spec)
  return np.array(y[0, :, 0, v:]), np.array(state.memories.memory[0, 0, 0, 0])


def numbers(inputs):
  """q, k, v `[time, dim]`, lambda, eta `[time]` of one row and head."""
  q, k, v = (np.array(x[0, :, 0]) for x in inputs[:3])
  lam = np.exp(np.array(inputs.log_decay[0, :, 0, 0]))
  return q, k, v, lam, np.array(inputs.write_rate[0, :, 0, 0])


def evicted(**changes):
  spec = tensor_cache.Spec(window_size=4, write_population="evicted")
  return dataclasses.replace(spec, **changes)


def every(**changes):
  return dataclasses.replace(
    tensor_cache.Spec(window_size=6, chunk_size=4), **changes
  )
