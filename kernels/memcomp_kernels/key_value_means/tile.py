"""The algebra of one chunk of Key-Value Means, as matrix products.

All tokens of the chunk are processed at once. The chunk makes room where it
begins, enters the window and reads:

  route   ranks the tokens that leave the window by their similarity to the
          rows. The least similar tokens get rows of their own; each of the
          others joins the nearest row
  merge   sK <- sK + A^T (w kbar), where A has one-hot rows that say which row
          each token joins, and w are the gates, or 1 for a token with a row of
          its own. sV changes in the same way. The platform decides between a
          product and a sum by index
  read    computes one softmax over [rows | window] under one mask

An appended token's row is m + its rank. The first chunk is the case without
live rows: nothing is similar, ranks are the order of the tokens, and all get
rows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.key_value_means import reference, rows


def leaving(state: reference.State, spec: reference.Spec) -> rows.LeavingChunk:
  """Returns the chunk of the window that the chunk at `position` replaces."""
  place = (state.position // spec.chunk_size) % spec.window_chunks

  def take(x):
    blocks = x.reshape(*x.shape[:2], spec.window_chunks, spec.chunk_size, -1)
    at = place[:, None, None, None, None]
    return jnp.take_along_axis(blocks, at, axis=2)[:, :, 0]

  key, gate = take(state.window_keys), take(state.window_gates)
  rotary = jnp.arange(key.shape[-1]) < spec.rotary_dim
  first = (state.position == spec.window)[:, None, None, None]
  return rows.LeavingChunk(
    keys=rows.layer_norm(jnp.where(rotary, 0, key), state, spec),
    values=take(state.window_values),
    gates=jnp.where(first, 1, gate),  # the first rows are not weighed
  )


def room(
  state: reference.State, spec: reference.Spec, capacity: int
) -> jax.Array:
  """Returns how many leaving tokens get rows of their own, `[batch]`."""
  chunk, index = spec.chunk_size, state.position // spec.chunk_size
  limits = jnp.array(spec.limits, jnp.int32)
  limit = limits[jnp.clip(index, 1, len(spec.limits)) - 1]
  outside = (index - spec.window_chunks + 1) * chunk
  most = jnp.minimum(jnp.minimum(limit, outside), capacity)
  free = jnp.clip(most - state.length, 0, chunk)
  return jnp.where(state.position == spec.window, chunk, free)


def moves(
  state: reference.State, present: jax.Array, spec: reference.Spec
) -> jax.Array:
  """Returns where a chunk begins with a full window, bool `[batch]`."""
  begins = (state.position % spec.chunk_size == 0) & jnp.any(present, axis=-1)
  return begins & (state.position >= spec.window)


def make_room(
  state: reference.State,
  moves: jax.Array,
  spec: reference.Spec,
  capacity: int,
  enter: Callable[..., rows.Entered] = rows.enter,
) -> reference.State:
  """Moves the oldest chunk of a full window into the memory.

  Args:
    state: the state before the chunk's first token.
    moves: bool `[batch]`, for which batch rows this is done.
    spec: the memory's options.
    capacity: capacity of the whole state, of which `state` may hold only the
      first rows.
    enter: a function like `rows.enter`.
  """
  chunk = leaving(state, spec)
  count = jnp.where(moves, room(state, spec, capacity), 0)
  keys, values, where = enter(state, chunk, count, moves, spec)
  radii = jnp.ones_like(state.radii, shape=where.row.shape)
  if spec.value_radius:
    _, new = rows.weighed(chunk, where.appended, spec)
    radii = jnp.where(where.appended, reference.length(new), 0)
  return state._replace(
    keys=keys,
    values=values,
    radii=rows.add(state, count, where, state.radii, radii),
    length=state.length + count,
  )


def enter_window(
  state: reference.State,
  inputs: reference.Inputs,
  present: jax.Array,
  spec: reference.Spec,
) -> reference.State:
  """Writes the tokens of one chunk to their places in the window."""
  chunks = spec.window_chunks
  place = (state.position // spec.chunk_size) % chunks
  here = jnp.arange(chunks) == place[:, None]
  here = here[:, None, :, None] & present[:, None, None]

  def put(x, new):
    blocks = x.reshape(*x.shape[:2], chunks, spec.chunk_size, *x.shape[3:])
    at = here.reshape(here.shape + (1,) * (x.ndim - 3))
    new = new.astype(x.dtype).reshape(*new.shape[:3], *x.shape[3:])
    return jnp.where(at, new[:, :, None], blocks).reshape(x.shape)

  return state._replace(
    window_keys=put(state.window_keys, inputs.key),
    window_values=put(state.window_values, inputs.value),
    window_gates=put(state.window_gates, inputs.merge_gate),
    position=state.position + jnp.sum(present, axis=-1, dtype=jnp.int32),
  )


def in_window(index: jax.Array, spec: reference.Spec) -> jax.Array:
  """Returns which tokens of the window the tokens of chunk `index` see.

  Args:
    index: int32 `[batch]`, index of the chunk.
    spec: the memory's options.

  Returns:
    bool `[batch, chunk, window]`.
  """
  chunk, chunks = spec.chunk_size, spec.window_chunks
  age = (index[:, None] - jnp.arange(chunks)) % chunks
  causal = jnp.tril(jnp.ones((chunk, chunk), bool))[None, :, None]
  earlier = (age > 0) & (age <= index[:, None])
  current = (age == 0)[:, None, :, None] & causal
  seen = current | earlier[:, None, :, None]
  return seen.reshape(seen.shape[0], chunk, chunks * chunk)


def read(
  state: reference.State,
  query: jax.Array,
  index: jax.Array,
  spec: reference.Spec,
) -> jax.Array:
  """Returns the read of chunk `index`: `[batch, heads, chunk, value]`, wide."""
  product = functools.partial(contract.product, dtype=query.dtype)
  live = rows.indices(state) < state.length[:, None]
  if spec.value_radius:
    size = jnp.maximum(reference.length(state.values), spec.radius_eps)
    factor = state.radii / size
  else:
    factor = 1 / jnp.where(live[:, None], state.radii, 1)
  temperatures = state.temperatures[..., None, None]
  scale = query.shape[-1] ** -0.5

  def scores(which, keys, visible):
    logits = product("bhcd,bhrd->bhcr", query, keys)
    logits = logits * (scale * temperatures[:, :, which])
    # The mask is not -inf, because an empty place may see nothing at all.
    lowest = jnp.finfo(logits.dtype).min
    return jnp.where(visible[:, None], logits, lowest)

  of_rows = scores(0, rows.layer_norm(state.keys, state, spec), live[:, None])
  of_window = scores(1, state.window_keys, in_window(index, spec))
  most = jnp.maximum(jnp.max(of_rows, axis=-1), jnp.max(of_window, axis=-1))
  most = lax.stop_gradient(most)[..., None]
  of_rows, of_window = jnp.exp(of_rows - most), jnp.exp(of_window - most)
  total = jnp.sum(of_rows, axis=-1) + jnp.sum(of_window, axis=-1)
  output = product("bhcr,bhrd->bhcd", of_rows, factor[..., None] * state.values)
  output += product("bhcr,bhrd->bhcd", of_window, state.window_values)
  return output / total[..., None]


def run(
  state: reference.State,
  inputs: reference.Inputs,
  present: jax.Array,
  spec: reference.Spec,
  capacity: int,
  enter: Callable[..., rows.Entered] = rows.enter,
) -> tuple[reference.State, jax.Array]:
  """Stores and reads one chunk, or a part of one.

  Args:
    state: the state before the tile, with as many of its rows as can be live.
    inputs: `[batch, heads, chunk, ...]`, each token at its place in the chunk.
    present: bool `[batch, chunk]`, places that hold a token.
    spec: the memory's options.
    capacity: rows of the whole state.
    enter: a function like `rows.enter`.

  Returns:
    The state after the tile, and y `[batch, heads, chunk, value]`, undefined
    where there is no token.
  """
  index = state.position // spec.chunk_size
  full = moves(state, present, spec)
  state = make_room(state, full, spec, capacity, enter)
  state = enter_window(state, inputs, present, spec)
  output = read(state, inputs.query, index, spec)
  return state, output.astype(inputs.query.dtype)
