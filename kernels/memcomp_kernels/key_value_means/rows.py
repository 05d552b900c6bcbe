"""Where the chunk that leaves the window goes, and adding it to the rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax

from memcomp_kernels import contract, dispatch
from memcomp_kernels.key_value_means import reference

ROUTE = "key_value_means_route"
"""Checkpoint name of the chosen rows: the backward pass keeps them."""


class LeavingChunk(NamedTuple):
  """The chunk that leaves the window.

  Attributes:
    keys: kbar, `[batch, heads, chunk, key]`.
    values: `[batch, heads, chunk, value]`.
    gates: `[batch, heads, chunk, 1]`.
  """

  keys: jax.Array
  values: jax.Array
  gates: jax.Array


class Route(NamedTuple):
  """Where the tokens of a chunk go.

  Attributes:
    row: int32 `[batch, heads, chunk]`, the row that each token enters.
    appended: bool `[batch, heads, chunk]`, whether that is the token's own row.
  """

  row: jax.Array
  appended: jax.Array


def layer_norm(x: jax.Array, state: reference.State, spec: reference.Spec):
  """Returns keys under the layer norm that compares them."""
  return reference.normed(
    x,
    scale=state.norm_scale[:, :, None],
    bias=state.norm_bias[:, :, None],
    eps=spec.norm_eps,
  )


def indices(state: reference.State) -> jax.Array:
  """Returns the index of every row, live or not."""
  return jnp.arange(state.keys.shape[2])


def _per_head(x: jax.Array) -> jax.Array:
  """Reshapes `[batch]` to broadcast against `[batch, heads, chunk]`."""
  return x[:, None, None]


def weighed(chunk: LeavingChunk, appended: jax.Array, spec: reference.Spec):
  """Returns keys and values as they are added to their rows."""
  weight = chunk.gates
  if not spec.gate_appends:
    weight = jnp.where(appended[..., None], 1, weight)
  return weight * chunk.keys, weight * chunk.values


def _nearest(scores: jax.Array, allowed: jax.Array):
  """Returns each token's greatest allowed score, and its first index."""
  scores = jnp.where(allowed, scores, -jnp.inf)
  greatest = jnp.max(scores, axis=-1)
  # These are two plain reductions: on a CPU argmax is ten times slower.
  size = scores.shape[-1]
  index = jnp.arange(size, dtype=jnp.int32)
  first = jnp.where(scores == greatest[..., None], index, size - 1)
  return greatest, jnp.min(first, axis=-1)


def targets(state: reference.State, spec: reference.Spec) -> jax.Array:
  """Returns the rows that a merge may go to, bool `[batch, 1, 1, rows]`."""
  rows = indices(state)
  live = rows < state.length[:, None]
  return (live & (rows >= spec.sink_rows))[:, None, None]


def new_targets(
  chunk: LeavingChunk,
  appended: jax.Array,
  state: reference.State,
  spec: reference.Spec,
):
  """Returns each token's nearest appended token: its score and index.

  New rows are tokens of the chunk, so they are scored before they are in the
  state.
  """
  keys, _ = weighed(chunk, appended, spec)
  scores = contract.product(
    "bhcd,bhid->bhci",
    chunk.keys,
    layer_norm(keys, state, spec),
    state.keys.dtype,
  )
  return _nearest(scores, appended[:, :, None])


def _rank(x: jax.Array) -> jax.Array:
  """Returns the places in a stable ascending sort of the last axis."""
  # This counts instead of sorting: a chunk is small, and a sort would be slow.
  index = jnp.arange(x.shape[-1])
  mine, other = x[..., :, None], x[..., None, :]
  before = (other < mine) | ((other == mine) & (index < index[:, None]))
  return jnp.sum(before, axis=-1, dtype=jnp.int32)


def route(
  state: reference.State,
  chunk: LeavingChunk,
  count: jax.Array,
  spec: reference.Spec,
) -> Route:
  """Finds the rows of a chunk, `count` `[batch]` of them new; no gradient."""
  state, chunk = lax.stop_gradient((state, chunk))
  known = contract.product(
    "bhcd,bhrd->bhcr",
    chunk.keys,
    layer_norm(state.keys, state, spec),
    state.keys.dtype,
  )
  live = (indices(state) < state.length[:, None])[:, None, None]
  rank = _rank(jnp.max(jnp.where(live, known, -jnp.inf), axis=-1))
  appended = rank < _per_head(count)

  length = _per_head(state.length)
  score, row = _nearest(known, targets(state, spec))
  new_score, token = new_targets(chunk, appended, state, spec)
  new_row = length + jnp.take_along_axis(rank, token, axis=-1)
  row = jnp.where(new_score > score, new_row, row)
  row = jnp.where(appended, length + rank, row)
  return Route(row, appended)


class Entered(NamedTuple):
  """Rows sK and sV after a chunk has entered them, and the chunk's route."""

  keys: jax.Array
  values: jax.Array
  route: Route


def enter(
  state: reference.State,
  chunk: LeavingChunk,
  count: jax.Array,
  moves: jax.Array,
  spec: reference.Spec,
) -> Entered:
  """Routes a chunk and adds it to the rows.

  Args:
    state: the state before the chunk enters.
    chunk: the chunk that leaves the window.
    count: `[batch]`, how many of its tokens get rows of their own.
    moves: bool `[batch]`, whether the chunk enters at all.
    spec: the memory's options.
  """
  row, appended = (
    ad_checkpoint.checkpoint_name(x, ROUTE)
    for x in route(state, chunk, count, spec)
  )
  row = jnp.where(moves[:, None, None], row, state.keys.shape[2])  # dropped
  return add_chunk(state, chunk, count, Route(row, appended), spec)


def add_chunk(
  state: reference.State,
  chunk: LeavingChunk,
  count: jax.Array,
  where: Route,
  spec: reference.Spec,
) -> Entered:
  """Adds a chunk to its rows; tokens with a row past the last are dropped."""
  new = weighed(chunk, where.appended, spec)
  keys, values = (
    add(state, count, where, x, y)
    for x, y in zip((state.keys, state.values), new, strict=True)
  )
  return Entered(keys, values, where)


def add(state, count, where: Route, x: jax.Array, new: jax.Array):
  """Adds `new` of tokens to `x` of their rows; new rows start from zero."""
  add = _add_by_index if adds_by_index() else _add_by_product
  rows, length = indices(state), state.length[:, None]
  fresh = (rows >= length) & (rows < length + count[:, None])
  fresh = fresh.reshape(fresh.shape[0], 1, -1, *(1,) * (x.ndim - 3))
  return add(jnp.where(fresh, 0, x), where.row, new)


def _add_by_index(x: jax.Array, row: jax.Array, new: jax.Array) -> jax.Array:
  """Adds `new` to rows of `x`; an index past the last row is dropped."""

  def one_head(x, row, new):
    return x.at[row].add(new, mode="drop")

  return jax.vmap(jax.vmap(one_head))(x, row, new)


def _add_by_product(x: jax.Array, row: jax.Array, new: jax.Array) -> jax.Array:
  """Computes `_add_by_index` as a product with one-hot rows."""
  taken = row[..., None] == jnp.arange(x.shape[2])
  return x + contract.product("bhcr,bhc...->bhr...", taken, new, x.dtype)


def adds_by_index() -> bool:
  """Whether tokens are added to their rows by index, not by a product.

  A CPU adds rows by index quickly. A GPU would add them in no fixed order, and
  a TPU one after another. Their matrix units compute the product.
  """
  return dispatch.current_platform() == "cpu"
