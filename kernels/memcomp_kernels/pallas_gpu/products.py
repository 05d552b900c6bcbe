"""Products by Hopper's matrix units, which run on while others are issued."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def products(*sums: list[tuple[Any, Any]]) -> list[jax.Array]:
  """Returns the sum of a b over the pairs of each list, float32.

  All products are issued, then waited for.

  Args:
    *sums: lists of pairs a, b of references to shared memory. (The interpreter
      takes no a in registers.)
  """

  def run(*accumulators):
    for accumulator, pairs in zip(accumulators, sums, strict=True):
      for a, b in pairs:
        plgpu.wgmma(accumulator, a, b)
    return [accumulator[...] for accumulator in accumulators]

  shapes = [(a.shape[0], b.shape[1]) for (a, b), *_ in sums]
  return pl.run_scoped(run, *(plgpu.ACC(x, jnp.float32) for x in shapes))


def transposed(ref: Any) -> Any:
  """A view of a reference to a matrix."""
  return ref.transpose((1, 0))
