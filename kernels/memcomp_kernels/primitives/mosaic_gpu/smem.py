"""What a kernel may hold in a multiprocessor's shared memory."""

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

LIMIT = 227 * 1024
"""Bytes a block may use on Hopper (CUDA C Programming Guide, table of technical
specifications per compute capability)."""
_SPARE = 4 * 1024  # reductions, barriers, alignment
_SWIZZLE = 128  # bytes


def layout(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
  """The transforms with which matrix units read `[..., rows, columns]`.

  None where rows are too short for the widest swizzle.
  """
  columns = _SWIZZLE // jnp.dtype(dtype).itemsize
  if len(shape) < 2 or shape[-1] % columns or shape[-2] % 8:
    return ()
  return (
    plgpu.TilingTransform((8, columns)),
    plgpu.SwizzleTransform(_SWIZZLE),
  )


def buffer(shape: tuple[int, ...], dtype: Any) -> Any:
  """Shared memory that matrix units read."""
  return plgpu.SMEM(shape, dtype, transforms=layout(shape, dtype))


def slots(
  operands: Iterable[Any],
  results: Iterable[Any],
  fixed: Iterable[Any],
  kernel: str,
) -> tuple[int, int]:
  """For how many steps shared memory holds operands, and results, at once.

  No results means that they go from registers to the device's memory: so they
  do where the next step's operands would have no room beside them.

  Args:
    operands: a step's part of each.
    results: likewise.
    fixed: other arrays, once each.
    kernel: whose they are.

  Raises:
    NotImplementedError: not even one step's operands fit.
  """

  def num_bytes(arrays):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

  room = LIMIT - _SPARE - num_bytes(fixed)
  sizes = num_bytes(operands), num_bytes(results)
  for counts in ((2, 2), (2, 1), (2, 0), (1, 0)):
    if sum(n * size for n, size in zip(counts, sizes, strict=True)) <= room:
      return counts
  raise NotImplementedError(
    f"{kernel} mosaic_gpu: a tile needs {sizes[0]:,} bytes of shared memory, "
    f"where {room:,} are free; take a shorter tile"
  )
