"""Asynchronous matmuls with wgmma on Hopper's matrix units."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def products(*sums: list[tuple[Any, Any]]) -> list[jax.Array]:
  """Returns, for each list, the sum of a b over its pairs, float32.

  The function issues all matmuls and then waits for them.

  Args:
    *sums: Lists of pairs a, b of references to shared memory. (The interpreter
      does not support an a in registers.)
  """

  def run(*accumulators):
    for accumulator, pairs in zip(accumulators, sums, strict=True):
      for a, b in pairs:
        plgpu.wgmma(accumulator, a, b)
    return [accumulator[...] for accumulator in accumulators]

  shapes = [(a.shape[0], b.shape[1]) for (a, b), *_ in sums]
  return pl.run_scoped(run, *(plgpu.ACC(x, jnp.float32) for x in shapes))


def transposed(ref: Any) -> Any:
  """Returns a transposed view of a reference to a matrix."""
  return ref.transpose((1, 0))
