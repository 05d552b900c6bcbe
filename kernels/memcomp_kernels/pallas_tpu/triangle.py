"""Inverses of unit triangular matrices on the matrix unit, of several heads.

Block by block: with D the inverses of the diagonal blocks of some size, and N
what the matrix has below them in blocks of twice the size, D - D N D are the
inverses of those. Every product has true inverses only: never powers of the
matrix, which cancel where keys repeat (`math.delta`).
"""

from collections.abc import Generator

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.pallas_tpu import blocks

_BLOCK = 16  # rows of a diagonal block, as many as a packed register has


def _terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  high = x.astype(jnp.bfloat16)
  return high, (x - high.astype(x.dtype)).astype(jnp.bfloat16)


def _product(x: jax.Array, y: jax.Array, heads: int, exact: bool) -> jax.Array:
  """`x` times the block diagonal of `y`, float32.

  Args:
    x: `[rows, heads * n]`, float32.
    y: `[n, heads * m]`, float32.
    heads: of both.
    exact: to float32's rounding; else to that of two bfloat16.
  """
  if exact:
    return blocks.nn(x, blocks.diagonal(y, heads))
  (high, low), terms = _terms(x), _terms(y)
  first, second = (blocks.diagonal(term, heads) for term in terms)
  return (
    blocks.nn(high, first) + blocks.nn(low, first) + blocks.nn(high, second)
  )


def inverse(
  matrix: jax.Array, heads: int, *, exact: bool
) -> Generator[None, None, jax.Array]:
  """Returns (I + matrix)^-1 of each head, as a stage by stage generator.

  Args:
    matrix: `[n, heads * n]`, float32, zero from the diagonal on; n is a power
      of 2, at least 16.
    heads: side by side.
    exact: to float32's rounding; else to that of two bfloat16.
  """
  size, lanes = matrix.shape
  count = lanes // _BLOCK  # blocks of all heads
  place = lax.broadcasted_iota(jnp.int32, (_BLOCK, lanes), 1) & (size - 1)
  block = place >> (_BLOCK.bit_length() - 1)

  def compact(shift):
    """Block (b + shift, b) of the rows on the lanes of b, `[block, lanes]`."""
    found = jnp.zeros((_BLOCK, lanes), jnp.float32)
    for b in range(size // _BLOCK - shift):
      rows = matrix[(b + shift) * _BLOCK : (b + shift + 1) * _BLOCK]
      found = jnp.where(block == b, rows, found)
    return found

  row = lax.broadcasted_iota(jnp.int32, (_BLOCK, lanes), 0)
  lane = place & (_BLOCK - 1)

  def below(bits):  # in blocks of 2**(bits + 1), the lower left quarter
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
    # Only every other block of rows has anything below the diagonal.
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
