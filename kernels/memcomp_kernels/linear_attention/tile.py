"""The algebra of one tile of linear attention, as matrix products.

Queries and keys are already features. The sum of features is one more column of
the memory, whose values are 1. In empty places they are 0, like all inputs.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels import affine, contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.linear_attention import reference


def prepare(inputs: reference.Inputs, spec: reference.Spec) -> affine.Tile:
  """Computes the part of the tile's algebra that needs no memory matrix.

  Args:
    inputs: `[batch, heads, tile, ...]`, with features as queries and keys.
    spec: unused. Features are taken before this, and sums divided after it.
  """
  del spec
  query, key, value, log_decay = inputs
  wide = jnp.promote_types(query.dtype, jnp.float32)
  if log_decay is None:
    log_decay = jnp.zeros_like(key[..., :1])
  log_decay = log_decay[..., 0].astype(wide)
  return affine.outer_tile(query, key, value.astype(wide), log_decay)


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory, for features and joined states."""
  return affine.form(prepare, call, wide=True)


_chunk = chunked.implementation(form)


def _joined(state: reference.State) -> reference.State:
  """Returns the state with z as the memory's last column."""
  if state.normalizer is None:
    return state
  columns = state.memory, state.normalizer[..., None]
  return state._replace(
    memory=jnp.concatenate(columns, axis=-1), normalizer=None
  )


def chunk(
  call: dispatch.Call, engine: form_lib.Engine | None = None
) -> tuple[reference.State, jax.Array]:
  """Computes what `reference` does, in chunk form; see `Op.chunk`."""
  spec, inputs, reset = call.spec, call.inputs, call.reset_state
  dtype, wide = inputs.query.dtype, call.state.memory.dtype
  phi = reference.FEATURE_MAPS[spec.feature_map]

  def features(x):
    return phi(x.astype(wide)).astype(dtype)

  value = inputs.value
  if spec.normalize:
    ones = jnp.ones((*value.shape[:-1], 1), value.dtype)
    value = jnp.concatenate([value, ones], axis=-1)
  laid = inputs._replace(
    query=features(inputs.query), key=features(inputs.key), value=value
  )
  joined, y, _ = _chunk(
    call._replace(
      state=_joined(call.state),
      inputs=laid,
      reset_state=None if reset is None else _joined(reset),
    ),
    engine,
  )
  y = contract.read_scale(spec, inputs.key.shape[-1]) * y
  if not spec.normalize:
    return joined, y.astype(dtype)
  state = joined._replace(
    memory=joined.memory[..., :-1], normalizer=joined.memory[..., -1]
  )
  return state, (y[..., :-1] / (y[..., -1:] + spec.eps)).astype(dtype)
