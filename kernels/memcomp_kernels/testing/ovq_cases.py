"""Online vector quantisation under the contract suite."""

import jax
import jax.numpy as jnp

from memcomp_kernels import ovq
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  del spec
  keys = iter(jax.random.split(key, 3))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  return ovq.Inputs(
    query=3 * memory.unit(normal(key_dim)),
    key=memory.unit(normal(key_dim)),
    value=normal(value_dim),
  )


def _state(key, spec, **sizes):
  """Returns a state with a dictionary of chunk_size tokens in random rows."""
  keys = jax.random.split(key)
  state = memory.fresh(ovq, spec, **sizes)
  rows = spec.rows(spec.chunk_size)
  used = (jnp.arange(spec.max_rows) < rows).astype(state.counts.dtype)
  # The counts add up to a chunk of tokens; the first row has the remainder.
  counts = jnp.ones(spec.max_rows).at[0].add(spec.chunk_size - rows)
  drawn = jax.random.normal(keys[0], state.keys.shape[1:])
  values = jax.random.normal(keys[1], state.values.shape[1:])
  return state._replace(
    keys=jnp.broadcast_to(memory.unit(drawn) * used[:, None], state.keys.shape),
    values=jnp.broadcast_to(values * used[:, None], state.values.shape),
    counts=jnp.broadcast_to(counts * used, state.counts.shape),
  )


def _edges(inputs):
  return memory.edges(inputs, *memory.KEYS) | {
    "large queries": inputs._replace(query=1e4 * inputs.query),
  }


_SPECS = {
  "plateau": ovq.Spec(chunk_size=8, max_rows=12),
  "linear": ovq.Spec(
    chunk_size=8, max_rows=10, growth="linear", count_bias=False
  ),
  "unit-rows": ovq.Spec(chunk_size=5, max_rows=12, normalize_rows=True),
}

MEMORY = memory.Memory(
  name="ovq",
  op=ovq,
  specs=_SPECS,
  typical=("plateau",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
  # Rows of zeros cannot be normalised, so they have no derivative here.
  smooth=("plateau", "linear"),
)
