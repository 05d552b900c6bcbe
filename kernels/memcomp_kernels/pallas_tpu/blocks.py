"""Several heads in one matmul: block diagonals, masks and transposes.

A unit is a group of `heads` heads that lie side by side on lanes. Arrays of a
unit have one of these layouts:

  by token  `[tokens, heads * dim]`    the sequence's own layout in memory
  by slot   `[slots, heads * tokens]`  slots on sublanes, so that sums over
                                       slots add whole registers
  state     `[slots, heads * dim]`
  scores    `[tokens, heads * tokens]`

One matmul multiplies two such arrays for all heads of a unit if its right
operand is block diagonal. Masks of bfloat16 arrays operate on int32 that hold
two bfloat16 each, because a select on bfloat16 would unpack and pack them.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.pallas_tpu import LANES


def _dot(a: jax.Array, b: jax.Array, dims) -> jax.Array:
  wide = a.dtype == jnp.float32
  return lax.dot_general(
    a,
    b,
    (dims, ((), ())),
    # One bfloat16 pass would lose digits of float32 that the caller paid for.
    precision=lax.Precision.HIGHEST if wide else None,
    preferred_element_type=jnp.float32,
  )


def nn(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns `a @ b` in float32."""
  return _dot(a, b, ((1,), (0,)))


def nt(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns `a @ b.T` in float32."""
  return _dot(a, b, ((1,), (1,)))


def tn(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns `a.T @ b` in float32."""
  return _dot(a, b, ((0,), (0,)))


def terms(x: jax.Array, count: int) -> list[jax.Array]:
  """Splits float32 into bfloat16 arrays; the sum of three is `x`."""
  found = []
  for _ in range(count):
    if found:
      x = x - found[-1].astype(x.dtype)
    found.append(x.astype(jnp.bfloat16))
  return found


def sum_nn(join: bool, *factors: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Sums `nn` of each pair; if `join`, by one matmul of concatenations."""
  if join and all(a.shape[1] % LANES == 0 for a, _ in factors):
    left, right = zip(*factors, strict=True)
    return nn(jnp.concatenate(left, 1), jnp.concatenate(right, 0))
  return functools.reduce(operator.add, [nn(a, b) for a, b in factors])


def sum_nt(join: bool, *factors: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Sums `nt` of each pair; if `join`, by one matmul of concatenations."""
  if join and all(a.shape[1] % LANES == 0 for a, _ in factors):
    left, right = zip(*factors, strict=True)
    return nt(jnp.concatenate(left, 1), jnp.concatenate(right, 1))
  return functools.reduce(operator.add, [nt(a, b) for a, b in factors])


def _packed(x: jax.Array) -> jax.Array:
  """Returns `x` as int32; each int32 holds two rows of bfloat16."""
  return pltpu.bitcast(x, jnp.int32)


def head_blocks(lanes: int, heads: int) -> jax.Array:
  """Returns each lane's head, int32 `[1, lanes]`.

  `lanes / heads` must be a power of 2.
  """
  shift = (lanes // heads).bit_length() - 1
  return lax.broadcasted_iota(jnp.int32, (1, lanes), 1) >> shift


def diagonal(x: jax.Array, heads: int) -> jax.Array:
  """Makes `[rows, heads * n]` block diagonal, `[heads * rows, heads * n]`."""
  if heads == 1:
    return x
  packed = _packed(x)
  head = jnp.broadcast_to(head_blocks(x.shape[1], heads), packed.shape)
  kept = [packed & jnp.where(head == h, -1, 0) for h in range(heads)]
  return pltpu.bitcast(jnp.concatenate(kept, 0), x.dtype)


def transpose(x: jax.Array, heads: int) -> jax.Array:
  """Transposes `[slots, heads * tokens]` to `[tokens, heads * slots]`.

  The function also converts back.
  """
  rows = _packed(x.T)
  size = rows.shape[0] // heads
  return pltpu.bitcast(
    jnp.concatenate([rows[h * size : (h + 1) * size] for h in range(heads)], 1),
    x.dtype,
  )


def side_by_side(x: jax.Array, heads: int, lanes: slice) -> jax.Array:
  """Converts `[heads * rows, tokens]` to `[rows, heads * tokens[lanes]]`."""
  packed = _packed(x)
  size = packed.shape[0] // heads
  parts = [packed[h * size : (h + 1) * size, lanes] for h in range(heads)]
  return pltpu.bitcast(jnp.concatenate(parts, 1), x.dtype)


def causal(tokens: int, heads: int, *, transposed: bool = False) -> jax.Array:
  """Returns the causal mask, bool `[tokens, heads * tokens]`.

  An entry is true where the row's token is the lane's token or after it. If
  `transposed`, it is true where the row's token is the lane's or before it.
  """
  shape = tokens, heads * tokens
  row = lax.broadcasted_iota(jnp.int32, shape, 0)
  lane = lax.broadcasted_iota(jnp.int32, shape, 1) & (tokens - 1)
  return row <= lane if transposed else row >= lane


def spread(column: jax.Array, heads: int, size: int) -> jax.Array:
  """Broadcasts columns `[heads * rows, 1]` to `[rows, heads * size]`.

  Each head's column fills the `size` lanes of that head.
  """
  rows = column.shape[0] // heads
  parts = [
    jnp.broadcast_to(column[h * rows : (h + 1) * rows], (rows, size))
    for h in range(heads)
  ]
  return jnp.concatenate(parts, 1)


def by_token(row: jax.Array, heads: int, size: int) -> jax.Array:
  """Converts `[1, heads * tokens]`, float32, to `[tokens, heads * size]`.

  Each number fills the `size` lanes of its head. The matrix unit does this
  exactly, with three bfloat16 whose sum is the number. Broadcasting a number
  over all lanes is the vector unit's most expensive move.
  """
  tokens = row.shape[1] // heads
  rest = jnp.concatenate(
    [row[:, h * tokens : (h + 1) * tokens] for h in range(heads)], axis=0
  )
  left = [x.astype(jnp.float32) for x in terms(rest, 3)]
  count = 3 * heads
  if free := -count % 16:
    left.append(jnp.zeros((free, tokens), jnp.float32))
  left = jnp.concatenate(left, axis=0).astype(jnp.bfloat16)
  shape = left.shape[0], heads * size
  term, own = (
    lax.broadcasted_iota(jnp.int32, shape, 0),
    head_blocks(shape[1], heads),
  )
  chosen = [term == own + n * heads for n in range(3)]
  chosen = functools.reduce(jnp.logical_or, chosen)
  return tn(left, jnp.where(chosen, 1.0, 0.0).astype(jnp.bfloat16))


def as_column(row: jax.Array) -> jax.Array:
  """Converts a row `[1, n]` to a column `[n, 1]`."""
  return jnp.transpose(jnp.broadcast_to(row, (8, row.shape[1])))[:, :1]


def first_of_heads(row: jax.Array, heads: int, size: int) -> jax.Array:
  """Broadcasts each head's first lane of a row to `size` lanes.

  The row is `[1, heads * n]`, the result `[1, heads * size]`.
  """
  tokens = row.shape[1] // heads
  parts = [
    jnp.broadcast_to(row[:, h * tokens : h * tokens + 1], (1, size))
    for h in range(heads)
  ]
  return jnp.concatenate(parts, 1)


def lane_in_head(lanes: int, heads: int) -> jax.Array:
  """Returns each lane's index within its head, int32 `[1, lanes]`."""
  lane = lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
  return lane & (lanes // heads - 1)


def sum_of_heads(row: jax.Array, heads: int, size: int) -> jax.Array:
  """Sums each head's lanes of a row, and repeats each sum on `size` lanes.

  The row is `[1, heads * n]`, the result `[1, heads * size]`.
  """
  lanes = row.shape[1] // heads
  parts = [
    jnp.broadcast_to(
      jnp.sum(row[:, h * lanes : (h + 1) * lanes], 1, keepdims=True), (1, size)
    )
    for h in range(heads)
  ]
  return jnp.concatenate(parts, 1)
