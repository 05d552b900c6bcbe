"""What a kernel may hold in a multiprocessor's shared memory."""

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

LIMIT = 227 * 1024
"""Bytes a block may use on Hopper (CUDA C Programming Guide, table of technical
specifications per compute capability)."""
_SPARE = 3 * 1024  # reductions over warps, and barriers beside them
_ALIGNMENT = 1024  # of each array, bytes
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

  def num_bytes(arrays, steps):
    sizes = (steps * math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

  operands, results = list(operands), list(results)
  room = LIMIT - _SPARE - num_bytes(fixed, 1)
  for counts in ((2, 2), (2, 1), (2, 0), (1, 0)):
    if num_bytes(operands, counts[0]) + num_bytes(results, counts[1]) <= room:
      return counts
  raise NotImplementedError(
    f"{kernel} mosaic_gpu: a tile needs {num_bytes(operands, 1):,} bytes of "
    f"shared memory, where {room:,} are free; take a shorter tile"
  )
