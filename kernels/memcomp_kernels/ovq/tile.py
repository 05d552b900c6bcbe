"""The algebra of one chunk of online vector quantisation, as matrix products.

All tokens of the chunk see the same dictionary. So a tile is one attention over
[dictionary | chunk up to the token], and one update of the dictionary if the
chunk is complete. If a chunk began in an earlier call, the memories hold its
first tokens, at the places that are empty in the tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.ovq import dictionary as dictionary_lib
from memcomp_kernels.ovq import reference


class Carry(NamedTuple):
  """A State for tiles; `taken` says which pending places hold tokens."""

  keys: jax.Array
  values: jax.Array
  counts: jax.Array
  pending_keys: jax.Array
  pending_values: jax.Array
  taken: jax.Array
  position: jax.Array
  segment_id: jax.Array


def chunk(call: dispatch.Call) -> tuple[reference.State, jax.Array]:
  """Computes what `reference` does, in chunk form; see `Op.chunk`."""
  form = form_lib.Form(
    spec=call.spec,
    tile_time=call.spec.chunk_size,
    run_tile=run,
    memories=Carry._fields[:6],
  )
  reset = None if call.reset_state is None else _carry(call.reset_state)
  carry, y, _ = chunked.run(
    form, call._replace(state=_carry(call.state), reset_state=reset)
  )
  fields = carry._asdict()
  del fields["taken"]
  return reference.State(**fields), y


def _carry(state: reference.State) -> Carry:
  taken = jnp.arange(state.pending_keys.shape[2]) < state.position[:, None]
  taken = taken[:, None, :, None].astype(state.keys.dtype)
  taken = jnp.broadcast_to(taken, (*state.pending_keys.shape[:3], 1))
  return Carry(**state._asdict(), taken=taken)


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Reads one chunk, and writes it if it is complete; see `Form.run_tile`.

  The memories are the dictionary's keys, values and counts; keys and values of
  the chunk so far; and which of its places are taken, `[batch, heads, chunk,
  1]`. The dictionary is the one at the chunk's start.
  """
  inputs, spec = call.inputs, call.spec
  *rows, keys, values, taken = call.memories
  D = dictionary_lib.Dictionary(*rows)
  query = inputs.query
  product = functools.partial(contract.product, dtype=query.dtype)
  here = call.valid[:, None, :, None]
  keys = jnp.where(here, inputs.key.astype(keys.dtype), keys)
  values = jnp.where(here, inputs.value.astype(values.dtype), values)
  taken = jnp.where(here, 1, taken)

  own = jnp.eye(spec.chunk_size, dtype=bool)
  seen = jnp.tril(jnp.ones_like(own)) & (taken[..., 0] > 0)[:, :, None] | own
  of_chunk = product("bhtk,bhjk->bhtj", query, keys)
  of_chunk = jnp.where(seen, of_chunk, -jnp.inf)
  of_rows = product("bhtk,bhik->bhti", query, D.keys)
  of_rows = of_rows + dictionary_lib.log_counts(D.counts, spec)[:, :, None]
  # The division comes last, because fewer numbers are then divided.
  largest = jnp.maximum(jnp.max(of_chunk, -1), jnp.max(of_rows, -1))
  largest = lax.stop_gradient(largest)[..., None]
  of_chunk, of_rows = jnp.exp(of_chunk - largest), jnp.exp(of_rows - largest)
  y = product("bhtj,bhjv->bhtv", of_chunk, values)
  y = y + product("bhti,bhiv->bhtv", of_rows, D.values)
  y = y / (jnp.sum(of_chunk, -1) + jnp.sum(of_rows, -1))[..., None]

  pending = keys, values, taken
  after = *dictionary_lib.update(D, keys, values, spec), *pending
  after = *after[:3], *jax.tree.map(jnp.zeros_like, pending)
  memories = contract.batched_where(call.complete, after, (*D, *pending))
  return memories, y.astype(query.dtype), None
