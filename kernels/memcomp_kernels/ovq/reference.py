"""Online vector quantisation token by token.

  y_t = sum_j p_{t,j} v_j + sum_i p_{t,i} V_i
  p_t = softmax over both of <q_t, k_j>, j of the current chunk up to t, and
        <q_t, K_i> + log c_i, i of the rows in use

with K, V, c the dictionary's keys, values and counts. When a chunk is whole its
tokens join the dictionary (`dictionary.update`) and the chunk is empty again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.ovq import dictionary as dictionary_lib
from memcomp_kernels.ovq import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Takes one token into the chunk and attends; a whole chunk is taken up.

  Args:
    state: the memory before the token.
    inputs: `[batch, heads, dim]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and y `[batch, heads, value]` in query's dtype.
  """
  dtype = state.keys.dtype
  q, k, v = (x.astype(dtype) for x in inputs)
  place = jnp.arange(spec.chunk_size)
  here = (place == state.position[:, None])[:, None, :, None]
  keys = jnp.where(here, k[:, :, None], state.pending_keys)
  values = jnp.where(here, v[:, :, None], state.pending_values)
  D = dictionary_lib.Dictionary(state.keys, state.values, state.counts)

  seen = place <= state.position[:, None]
  of_chunk = _einsum("bhk,bhjk->bhj", q, keys)
  of_chunk = jnp.where(seen[:, None], of_chunk, -jnp.inf)
  of_rows = _einsum("bhk,bhik->bhi", q, D.keys)
  of_rows = of_rows + dictionary_lib.log_counts(D.counts, spec)
  p = jax.nn.softmax(jnp.concatenate([of_rows, of_chunk], -1), axis=-1)
  y = _einsum("bhj,bhjv->bhv", p, jnp.concatenate([D.values, values], 2))

  position = (state.position + 1) % spec.chunk_size
  whole = position == 0
  D = contract.batched_where(
    whole, dictionary_lib.update(D, keys, values, spec), D
  )
  keys, values = contract.batched_where(
    whole, jax.tree.map(jnp.zeros_like, (keys, values)), (keys, values)
  )
  segment_id = contract.next_segment_id(state.segment_id)
  state = types.State(
    D.keys, D.values, D.counts, keys, values, position, segment_id
  )
  return state, y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
