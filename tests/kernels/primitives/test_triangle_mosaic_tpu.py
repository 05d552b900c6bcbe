"""Triangular inverses of TPU kernels, interpreted, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.pallas_tpu import triangle


def inverse(matrix, *, exact):
  """Of `[heads, n, n]`, by a kernel of its own."""
  heads, size, _ = matrix.shape

  def kernel(given, found):
    stages = triangle.inverse(given[...], heads, exact=exact)
    while True:
      try:
        next(stages)
      except StopIteration as end:
        found[...] = end.value
        return

  laid = np.swapaxes(matrix, 0, 1).reshape(size, heads * size)
  found = pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(laid.shape, jnp.float32),
    interpret=pltpu.InterpretParams(),
  )(jnp.array(laid, jnp.float32))
  return np.swapaxes(np.asarray(found).reshape(size, heads, size), 0, 1)


def expected(matrix):
  return np.linalg.inv(np.eye(matrix.shape[1]) + matrix)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
  ("heads", "size"),
  [(8, 16), (4, 32), (2, 64), (1, 128)],
)
def test_of_keys(heads, size, exact):
  """What unit keys make of it, some alike."""
  keys = np.random.default_rng(0).normal(size=(heads, size, 8))
  keys[:, 5:9] = keys[:, 4:5]
  keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
  matrix = np.tril(keys @ np.swapaxes(keys, 1, 2), -1)
  truth = expected(matrix)
  error = np.abs(inverse(matrix, exact=exact) - truth).max()
  assert error <= (1e-5 if exact else 2e-4) * np.abs(truth).max(), error


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_of_one_key_again_and_again(rate):
  """Powers of this matrix grow like binomials; its inverse does not."""
  matrix = rate * np.tril(np.ones((2, 64, 64)), -1)
  np.testing.assert_allclose(
    inverse(matrix, exact=False), expected(matrix), atol=1e-4
  )
