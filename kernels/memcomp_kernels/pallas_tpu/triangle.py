"""Inverses of unit triangular matrices of several heads, on the matrix unit.

The inverse grows block by block. Let D hold the inverses of the diagonal blocks
of some size. Let N hold the matrix's entries below D's blocks, within diagonal
blocks of twice the size. Then D - D N D are the inverses of the larger blocks.
All factors are true inverses, never powers of the matrix, because powers cancel
where keys repeat (see `math.delta`).
"""

from collections.abc import Generator

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.pallas_tpu import blocks

_BLOCK = 16  # rows of a diagonal block; a packed register has as many


def _product(x: jax.Array, y: jax.Array, heads: int, exact: bool) -> jax.Array:
  """Returns `x` times the block diagonal of `y`, float32.

  Args:
    x: Left operand, `[rows, heads * n]`, float32.
    y: Right operand, `[n, heads * m]`, float32.
    heads: Number of heads in both.
    exact: Whether the product has float32's rounding error; otherwise it has
      that of two bfloat16.
  """
  if exact:
    return blocks.nn(x, blocks.diagonal(y, heads))
  high, low = blocks.terms(x, 2)
  first, second = (blocks.diagonal(term, heads) for term in blocks.terms(y, 2))
  return (
    blocks.nn(high, first) + blocks.nn(low, first) + blocks.nn(high, second)
  )


def inverse(
  matrix: jax.Array, heads: int, *, exact: bool
) -> Generator[None, None, jax.Array]:
  """Computes (I + matrix)^-1 of each head.

  The generator yields between its stages and returns the result.

  Args:
    matrix: Strictly lower triangular matrix of each head, `[n, heads * n]`,
      float32. n is a power of 2, at least 16.
    heads: Number of heads, side by side.
    exact: Whether products have float32's rounding error; otherwise they have
      that of two bfloat16.
  """
  size, lanes = matrix.shape
  count = lanes // _BLOCK  # blocks of all heads
  place = lax.broadcasted_iota(jnp.int32, (_BLOCK, lanes), 1) & (size - 1)
  block = place >> (_BLOCK.bit_length() - 1)

  def compact(shift):
    """Puts the rows of block (b + shift, b) on b's lanes, `[block, lanes]`."""
    found = jnp.zeros((_BLOCK, lanes), jnp.float32)
    for b in range(size // _BLOCK - shift):
      rows = matrix[(b + shift) * _BLOCK : (b + shift + 1) * _BLOCK]
      found = jnp.where(block == b, rows, found)
    return found

  row = lax.broadcasted_iota(jnp.int32, (_BLOCK, lanes), 0)
  lane = place & (_BLOCK - 1)

  def below(bits):  # the lower left quarter of blocks of size 2**(bits + 1)
    return ((row >> bits) == (lane >> bits) + 1) & ((lane >> bits) & 1 == 0)

  diagonal = compact(0)
  found = jnp.where(row == lane, 1.0, 0.0) - jnp.where(below(0), diagonal, 0.0)
  for bits in range(1, _BLOCK.bit_length() - 1):
    rest = jnp.where(below(bits), diagonal, 0.0)
    yield
    rest = _product(rest, found, count, exact)
    yield
    found = found - _product(found, rest, count, exact)
  found = jnp.concatenate(
    [jnp.where(block == b, found, 0.0) for b in range(size // _BLOCK)], axis=0
  )
  step = _BLOCK
  while step < size:
    # Only every second block of rows has anything below the diagonal.
    odd = range(step, size, 2 * step)
    bits = step.bit_length() - 1
    rest = jnp.concatenate([matrix[s : s + step] for s in odd], axis=0)
    left = jnp.concatenate([found[s : s + step] for s in odd], axis=0)
    shape = rest.shape
    own = lax.broadcasted_iota(jnp.int32, shape, 0) >> bits
    at = (lax.broadcasted_iota(jnp.int32, shape, 1) & (size - 1)) >> bits
    rest = jnp.where(at == 2 * own, rest, 0.0)
    yield
    rest = _product(rest, found, heads, exact)
    zeros = jnp.zeros((step, lanes), jnp.float32)
    parts = [rest[i * step : (i + 1) * step] for i in range(len(odd))]
    rest = jnp.concatenate([x for part in parts for x in (zeros, part)], axis=0)
    yield
    rest = _product(left, rest, heads, exact)
    parts = [
      x
      for i, s in enumerate(odd)
      for x in (
        found[s - step : s],
        found[s : s + step] - rest[i * step : (i + 1) * step],
      )
    ]
    found = jnp.concatenate(parts, axis=0)
    step *= 2
  return found
