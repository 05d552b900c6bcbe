"""A tile of Key-Value Means, except its window, as one Pallas TPU kernel.

The chunk that leaves the window enters the rows: scores, ranks, the nearest
rows, and sums by one-hot matmuls. Then the current chunk reads rows and window.
No score leaves VMEM. Rows are on sublanes and tokens on lanes, so that sums
over rows add whole registers. All arrays for entering are float32. The kernel
splits what it adds into three bfloat16 parts. A matmul with ones and zeros then
adds these exactly.
"""

import functools
from collections.abc import Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memcomp_kernels.key_value_means import reference
from memcomp_kernels.math import activations
from memcomp_kernels.pallas_tpu import blocks, launch

HEADS = 2
"""Maximum heads per grid step."""

_FIX = "take fewer rows or smaller chunks"

_SCORES = 8
"""Number of a head's score arrays that a step may hold at once."""


def _first(scores: jax.Array, best: jax.Array, index: jax.Array) -> jax.Array:
  """Returns the first index, along sublanes, of each lane's best score."""
  last = float(scores.shape[0] - 1)
  return jnp.min(jnp.where(scores == best, index, last), axis=0, keepdims=True)


def _index(size: int, axis: int) -> jax.Array:
  shape = (size, 1) if axis == 0 else (1, size)
  index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
  return index.astype(jnp.float32)


def _row(column: jax.Array) -> jax.Array:
  """Converts a column `[n, 1]` to a row `[1, n]`."""
  return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], 8)))[:1]


def _length(x: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))


def _body(spec: reference.Spec, heads: int, refs: dict[str, Any]) -> None:
  """Runs one grid step; see `run`."""

  def of_head(h):
    return {
      name: ref if name == "counts" else ref.at[0, h]
      for name, ref in refs.items()
    }

  # Heads run in lock step, because the compiler keeps matmuls in program order.
  live = [_head(spec, of_head(h)) for h in range(heads)]
  while live:
    live = [piece for piece in live if next(piece, True) is None]


def _head(spec, refs) -> Iterator[None]:
  """Computes one head; yields where it waits for matmuls."""
  held = yield from _enter(spec, refs)
  yield from _read(spec, refs, held)


def _norm(spec, refs, x):
  x = activations.layer_norm(x, spec.norm_eps)
  return x * refs["scale"][...] + refs["bias"][...]


def _enter(spec, refs) -> Generator[None, None, tuple[jax.Array, ...]]:
  """Adds the leaving chunk; returns keys, values and radii (a column)."""
  counts = refs["counts"], pl.program_id(0)
  length, count, moves, first = (counts[0][counts[1], i] for i in range(4))
  length, count = length.astype(jnp.float32), count.astype(jnp.float32)
  rows, chunk = refs["keys"].shape[0], refs["leaving_keys"].shape[0]
  row_index, token = _index(rows, 0), _index(chunk, 1)
  other = _index(chunk, 0)
  live = row_index < length
  target = live & (row_index >= spec.sink_rows)

  key = refs["leaving_keys"][...]
  channel = jax.lax.broadcasted_iota(jnp.int32, key.shape, 1)
  key = _norm(spec, refs, jnp.where(channel < spec.rotary_dim, 0.0, key))
  gate = blocks.as_column(refs["leaving_gates"][...])
  gate = jnp.where(first != 0, 1.0, gate)
  own = _norm(spec, refs, gate * key if spec.gate_appends else key)
  known = blocks.nt(_norm(spec, refs, refs["keys"][...]), key)
  yield
  own = blocks.nt(own, key)
  yield

  novelty = jnp.where(live, known, -jnp.inf)
  novelty = jnp.max(novelty, axis=0, keepdims=True)
  column = blocks.as_column(novelty)
  before = (column < novelty) | ((column == novelty) & (other < token))
  rank = jnp.sum(jnp.where(before, 1.0, 0.0), axis=0, keepdims=True)
  appended, ranks = rank < count, blocks.as_column(rank)

  scores = jnp.where(target, known, -jnp.inf)
  score = jnp.max(scores, axis=0, keepdims=True)
  row = _first(scores, score, row_index)
  yield
  among = jnp.where(ranks < count, own, -jnp.inf)
  new_score = jnp.max(among, axis=0, keepdims=True)
  nearest = other == _first(among, new_score, other)
  new_row = jnp.sum(jnp.where(nearest, ranks, 0.0), axis=0, keepdims=True)
  row = jnp.where(new_score > score, length + new_row, row)
  row = jnp.where(appended, length + rank, row)
  row = jnp.where(moves != 0, row, float(rows))  # `rows` means no row
  yield
  refs["row"][...] = row.astype(jnp.int32)
  refs["appended"][...] = jnp.where(appended, 1, 0)

  weight = gate
  if not spec.gate_appends:
    weight = jnp.where(ranks < count, 1.0, weight)
  taken = jnp.where(row_index == row, 1.0, 0.0)
  fresh = (row_index >= length) & (row_index < length + count)
  value = weight * refs["leaving_values"][...]
  new = jnp.concatenate([weight * key, value], axis=1)
  old = jnp.concatenate([refs["keys"][...], refs["values"][...]], axis=1)
  low = taken.astype(jnp.bfloat16)
  added = sum(blocks.nn(low, part) for part in blocks.terms(new, 3))
  yield
  new = jnp.where(fresh, 0.0, old) + added
  keys, values = new[:, : key.shape[1]], new[:, key.shape[1] :]
  refs["new_keys"][...], refs["new_values"][...] = keys, values

  sizes = jnp.ones_like(rank)
  if spec.value_radius:
    sizes = jnp.where(appended, _row(_length(value)), 0.0)
  radii = blocks.as_column(refs["radii"][...])
  radii = jnp.where(fresh, 0.0, radii)
  radii += jnp.sum(taken * sizes, axis=1, keepdims=True)
  refs["new_radii"][...] = _row(radii)
  yield
  return keys, values, radii


def _read(spec, refs, held) -> Iterator[None]:
  """Reads rows and window."""
  keys, values, radii = held
  batch = pl.program_id(0)
  length = refs["counts"][batch, 0] + refs["counts"][batch, 1]
  index, place = refs["counts"][batch, 4], refs["counts"][batch, 5]
  query = refs["query"][...]
  dtype, chunk = query.dtype, query.shape[0]
  if spec.value_radius:
    factor = radii / jnp.maximum(_length(values), spec.radius_eps)
  else:
    factor = 1 / jnp.maximum(radii, 1.0)
  scale = query.shape[1] ** -0.5
  lowest = float(jnp.finfo(jnp.float32).min)

  def scores(which, keys, seen):
    logits = blocks.nt(keys.astype(dtype), query)
    logits *= scale * refs["temperatures"][:, which : which + 1]
    return jnp.where(seen, logits, lowest)

  live = _index(keys.shape[0], 0) < length.astype(jnp.float32)
  causal = _index(chunk, 0) <= _index(chunk, 1)
  parts = [(scores(0, _norm(spec, refs, keys), live), factor * values)]
  for i in range(spec.window_chunks):
    # Chunk i of the ring is `age` chunks old.
    age = place - i
    age = jnp.where(age < 0, age + spec.window_chunks, age)
    seen = (causal & (age == 0)) | ((age > 0) & (age <= index))
    here = slice(i * chunk, (i + 1) * chunk)
    logits = scores(1, refs["window_keys"][here], seen)
    parts.append((logits, refs["window_values"][here]))
  yield
  most = [jnp.max(x, axis=0, keepdims=True) for x, _ in parts]
  most = functools.reduce(jnp.maximum, most)
  shares = [jnp.exp(x - most) for x, _ in parts]
  yield
  total = sum(jnp.sum(x, axis=0, keepdims=True) for x in shares)
  output = sum(
    blocks.tn(x.astype(dtype), share.astype(dtype))
    for share, (_, x) in zip(shares, parts, strict=True)
  )
  yield
  refs["output"][...] = jnp.transpose(output / total).astype(dtype)


def too_large(given: dict[str, Any], spec: reference.Spec) -> str | None:
  """Returns why `run` cannot hold one head's rows in VMEM, or None if it can.

  `given` may also be shapes.
  """
  needed = _bytes(given | _results(given, spec), spec, heads=1)
  return launch.too_large(needed, "kvm_tile", _FIX)


def _results(given: dict[str, Any], spec: reference.Spec) -> dict[str, Any]:
  """Returns the shapes of `run`'s results."""
  batch, heads = given["keys"].shape[:2]
  chunk, value_dim = spec.chunk_size, given["values"].shape[-1]

  def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((batch, heads, *shape), dtype)

  rows = {
    f"new_{name}": struct(*given[name].shape[2:])
    for name in ("keys", "values", "radii")
  }
  return rows | {
    "row": struct(1, chunk, dtype=jnp.int32),
    "appended": struct(1, chunk, dtype=jnp.int32),
    "output": struct(chunk, value_dim, dtype=given["query"].dtype),
  }


def _specs(
  arrays: dict[str, Any], spec: reference.Spec, heads: int
) -> dict[str, pl.BlockSpec]:
  """Returns a step's blocks: some heads of a row.

  Of the window before the tile, a block is only the chunk that leaves it.
  """

  def one(name, x):
    shape = list(x.shape[2:])
    if not name.startswith("leaving"):
      return pl.BlockSpec((1, heads, *shape), lambda b, h, counts: (b, h, 0, 0))
    axis = shape.index(spec.window)
    shape[axis] = spec.chunk_size

    def place(b, h, counts):
      at = counts[b, 5]
      return (b, h, at, 0) if axis == 0 else (b, h, 0, at)

    return pl.BlockSpec((1, heads, *shape), place)

  return {name: one(name, x) for name, x in arrays.items()}


def _bytes(arrays: dict[str, Any], spec: reference.Spec, heads: int) -> int:
  """Returns the bytes of VMEM that a step of some heads needs."""
  rows = arrays["keys"].shape[2] + spec.window
  size = launch.num_bytes(arrays, _specs(arrays, spec, heads), {})
  return size + _SCORES * rows * spec.chunk_size * 4


def run(
  given: dict[str, jax.Array], counts: jax.Array, spec: reference.Spec
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    given: Arrays by name, `[batch, heads, ...]`; all except `query` are
      float32. Rows are `keys`, `values` `[rows, dim]` and `radii` `[1, rows]`.
      The window before the tile's tokens is `leaving_keys`, `leaving_values`
      `[window, dim]` and `leaving_gates` `[1, window]`. The window after them
      is `window_keys` and `window_values`. `query` is `[chunk, key]`. `scale`
      and `bias` of LN_s are `[1, key]`. `temperatures` is `[1, 2]`.
    counts: int32 `[batch, 6]`: the number of live rows; the number of tokens
      that get new rows; whether the leaving chunk enters at all; whether it is
      the first; the current chunk's number; its index in the window.
    spec: Options that define the memory.

  Returns:
    Arrays by name. `new_keys`, `new_values` and `new_radii` are rows. `row` and
    `appended` are int32 `[1, chunk]`; see `rows.Route`. A `row` past the last
    one means no row. `output` is `[chunk, value]`.
  """
  batch, num_heads = given["keys"].shape[:2]
  results = _results(given, spec)
  arrays = given | results
  choices = [n for n in range(HEADS, 0, -1) if num_heads % n == 0]
  heads = next(
    (n for n in choices if _bytes(arrays, spec, n) <= launch.LIMIT), 1
  )
  if reason := too_large(given, spec):
    raise NotImplementedError(reason)
  return launch.run(
    functools.partial(_body, spec, heads),
    "kvm_tile",
    (batch, num_heads // heads),
    given,
    results,
    specs=_specs(arrays, spec, heads),
    scratch={},
    fix=_FIX,
    scalars={"counts": counts},
    sequential=0,
  )
