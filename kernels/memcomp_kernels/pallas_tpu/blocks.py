"""Several heads in one matrix product: block diagonals, masks, transposes.

A unit is `heads` heads side by side on lanes. Arrays of a unit are

  by token  `[tokens, heads * dim]`    as the sequence lies in memory
  by slot   `[slots, heads * tokens]`  slots on sublanes, so that sums over
                                       slots add whole registers
  state     `[slots, heads * dim]`
  scores    `[tokens, heads * tokens]`

and a product of two of them per head is one product in which the right operand
is block diagonal. Masks act on packed pairs of bfloat16 as on int32: a select
on bfloat16 unpacks and packs again.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128


def _dot(a: jax.Array, b: jax.Array, dims) -> jax.Array:
  wide = a.dtype == jnp.float32
  return lax.dot_general(
    a,
    b,
    (dims, ((), ())),
    # float32 in one bfloat16 pass would lose what the caller paid for.
    precision=lax.Precision.HIGHEST if wide else None,
    preferred_element_type=jnp.float32,
  )


def nn(a: jax.Array, b: jax.Array) -> jax.Array:
  """`a @ b` in float32."""
  return _dot(a, b, ((1,), (0,)))


def nt(a: jax.Array, b: jax.Array) -> jax.Array:
  """`a @ b.T` in float32."""
  return _dot(a, b, ((1,), (1,)))


def tn(a: jax.Array, b: jax.Array) -> jax.Array:
  """`a.T @ b` in float32."""
  return _dot(a, b, ((0,), (0,)))


def sum_nn(join: bool, *factors: tuple[jax.Array, jax.Array]) -> jax.Array:
  """The sum of `nn` of pairs; as one product of concatenations if `join`."""
  if join and all(a.shape[1] % LANES == 0 for a, _ in factors):
    left, right = zip(*factors, strict=True)
    return nn(jnp.concatenate(left, 1), jnp.concatenate(right, 0))
  return functools.reduce(operator.add, [nn(a, b) for a, b in factors])


def sum_nt(join: bool, *factors: tuple[jax.Array, jax.Array]) -> jax.Array:
  """As `sum_nn`, of `nt`."""
  if join and all(a.shape[1] % LANES == 0 for a, _ in factors):
    left, right = zip(*factors, strict=True)
    return nt(jnp.concatenate(left, 1), jnp.concatenate(right, 1))
  return functools.reduce(operator.add, [nt(a, b) for a, b in factors])


def _packed(x: jax.Array) -> jax.Array:
  """As int32, two rows of bfloat16 in one."""
  return pltpu.bitcast(x, jnp.int32)


def head_blocks(lanes: int, heads: int) -> jax.Array:
  """The head of each lane, int32 `[1, lanes]`; `lanes / heads` a power of 2."""
  shift = (lanes // heads).bit_length() - 1
  return lax.broadcasted_iota(jnp.int32, (1, lanes), 1) >> shift


def diagonal(x: jax.Array, heads: int) -> jax.Array:
  """`[rows, heads * n]` to `[heads * rows, heads * n]`, block diagonal."""
  if heads == 1:
    return x
  packed = _packed(x)
  head = jnp.broadcast_to(head_blocks(x.shape[1], heads), packed.shape)
  kept = [packed & jnp.where(head == h, -1, 0) for h in range(heads)]
  return pltpu.bitcast(jnp.concatenate(kept, 0), x.dtype)


def transpose(x: jax.Array, heads: int) -> jax.Array:
  """`[slots, heads * tokens]` to `[tokens, heads * slots]`, and back."""
  rows = _packed(x.T)
  size = rows.shape[0] // heads
  return pltpu.bitcast(
    jnp.concatenate([rows[h * size : (h + 1) * size] for h in range(heads)], 1),
    x.dtype,
  )


def side_by_side(x: jax.Array, heads: int, lanes: slice) -> jax.Array:
  """`[heads * rows, tokens]` to `[rows, heads * tokens[lanes]]`."""
  packed = _packed(x)
  size = packed.shape[0] // heads
  parts = [packed[h * size : (h + 1) * size, lanes] for h in range(heads)]
  return pltpu.bitcast(jnp.concatenate(parts, 1), x.dtype)


def causal(tokens: int, heads: int, *, transposed: bool = False) -> jax.Array:
  """Bool `[tokens, heads * tokens]`: the row's token is not before the lane's.

  Or not after it if `transposed`.
  """
  shape = tokens, heads * tokens
  row = lax.broadcasted_iota(jnp.int32, shape, 0)
  lane = lax.broadcasted_iota(jnp.int32, shape, 1) & (tokens - 1)
  return row <= lane if transposed else row >= lane


def spread(column: jax.Array, heads: int, size: int) -> jax.Array:
  """Columns `[heads * rows, 1]` to `[rows, heads * size]`, one a head."""
  rows = column.shape[0] // heads
  parts = [
    jnp.broadcast_to(column[h * rows : (h + 1) * rows], (rows, size))
    for h in range(heads)
  ]
  return jnp.concatenate(parts, 1)


def by_token(row: jax.Array, heads: int, size: int) -> jax.Array:
  """`[1, heads * tokens]`, float32, to `[tokens, heads * size]`.

  By the matrix unit, as three bfloat16 whose sum is exact: moving a number over
  all lanes is the dearest of the vector unit's moves.
  """
  tokens = row.shape[1] // heads
  rest = jnp.concatenate(
    [row[:, h * tokens : (h + 1) * tokens] for h in range(heads)], axis=0
  )
  terms = []
  for _ in range(3):
    terms.append(rest.astype(jnp.bfloat16).astype(jnp.float32))
    rest = rest - terms[-1]
  count = 3 * heads
  if free := -count % 16:
    terms.append(jnp.zeros((free, tokens), jnp.float32))
  terms = jnp.concatenate(terms, axis=0).astype(jnp.bfloat16)
  shape = terms.shape[0], heads * size
  term, own = (
    lax.broadcasted_iota(jnp.int32, shape, 0),
    head_blocks(shape[1], heads),
  )
  chosen = [term == own + n * heads for n in range(3)]
  chosen = functools.reduce(jnp.logical_or, chosen)
  return tn(terms, jnp.where(chosen, 1.0, 0.0).astype(jnp.bfloat16))


def as_column(row: jax.Array) -> jax.Array:
  """`[1, n]` to `[n, 1]`."""
  return jnp.transpose(jnp.broadcast_to(row, (8, row.shape[1])))[:, :1]


def first_of_heads(row: jax.Array, heads: int, size: int) -> jax.Array:
  """The first lane of each head of `[1, heads * n]`, `[1, heads * size]`."""
  tokens = row.shape[1] // heads
  parts = [
    jnp.broadcast_to(row[:, h * tokens : h * tokens + 1], (1, size))
    for h in range(heads)
  ]
  return jnp.concatenate(parts, 1)


def lane_in_head(lanes: int, heads: int) -> jax.Array:
  """The place of each lane in its head, int32 `[1, lanes]`."""
  lane = lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
  return lane & (lanes // heads - 1)


def sum_of_heads(row: jax.Array, heads: int, size: int) -> jax.Array:
  """The sum over each head's lanes of `[1, heads * n]`, `size` times."""
  lanes = row.shape[1] // heads
  parts = [
    jnp.broadcast_to(
      jnp.sum(row[:, h * lanes : (h + 1) * lanes], 1, keepdims=True), (1, size)
    )
    for h in range(heads)
  ]
  return jnp.concatenate(parts, 1)
