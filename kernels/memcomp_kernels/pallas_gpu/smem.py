"""What a kernel may hold in a multiprocessor's shared memory."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

MULTIPROCESSORS = 132
"""Of an H100 or H200. Other Hoppers have fewer: a choice by this number is of
speed only."""
LIMIT = 227 * 1024
"""Bytes a block may use on Hopper (CUDA C Programming Guide, table of technical
specifications per compute capability)."""
_HALF = 113 * 1024  # where a multiprocessor is to have room for two blocks
_SPARE = 3 * 1024  # reductions over warps, and barriers beside them
_ALIGNMENT = 1024  # of each array, bytes
_SWIZZLE = 128  # bytes, the widest


def swizzle(arrays: Iterable[Any]) -> int:
  """Bytes of the swizzle that all matrices of operands can have.

  Both operands of a product must have the same.
  """
  rows = (
    x.shape[-1] * x.dtype.itemsize
    for x in arrays
    if len(x.shape) > 1 and x.dtype.itemsize == 2
  )
  return _SWIZZLE // 2 if _SWIZZLE // 2 in rows else _SWIZZLE


def layout(
  shape: tuple[int, ...], dtype: Any, swizzle: int = _SWIZZLE
) -> tuple[Any, ...]:
  """The transforms with which matrix units read `[..., rows, columns]`.

  None where rows are too short for the swizzle.

  Args:
    shape: of an array.
    dtype: its type; numbers of four bytes are no operands, and have the widest
      swizzle.
    swizzle: bytes, of operands.
  """
  size = jnp.dtype(dtype).itemsize
  swizzle = swizzle if size == 2 else _SWIZZLE
  columns = swizzle // size
  if len(shape) < 2 or shape[-1] % columns or shape[-2] % 8:
    return ()
  return (
    plgpu.TilingTransform((8, columns)),
    plgpu.SwizzleTransform(swizzle),
  )


def buffer(shape: tuple[int, ...], dtype: Any, swizzle: int = _SWIZZLE) -> Any:
  """Shared memory that matrix units read; as `layout`."""
  return plgpu.SMEM(shape, dtype, transforms=layout(shape, dtype, swizzle))


class Slots(NamedTuple):
  """For how many steps shared memory holds arrays at once.

  Attributes:
    operands: 1 or 2.
    results: by name, 0 to 2. Those with 0 go from registers to the device's
      memory, or take an operand's place.
  """

  operands: int
  results: dict[str, int]


def slots(
  operands: Iterable[Any],
  results: Mapping[str, Any],
  fixed: Iterable[Any],
  kernel: str,
  in_place: Collection[str] = (),
  *,
  steps: int,
  blocks: int,
) -> Slots:
  """What shared memory has room for; the next step's operands come first.

  Results are without a slot only where the next step's operands, or this one's,
  would have no room beside them; or where there is one step, which leaves as
  much room as it can to other blocks of threads. Where there are more of these
  than multiprocessors, two share one if the next step's operands still have
  room.

  Args:
    operands: a step's part of each.
    results: likewise, by name.
    fixed: other arrays, once each.
    kernel: whose they are.
    in_place: results that may take an operand's place.
    steps: how many there are.
    blocks: of threads, each with all steps of its own.

  Raises:
    NotImplementedError: not even one step's operands fit.
  """

  def num_bytes(arrays, steps):
    sizes = (steps * math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

  def placed(key):
    # Registers write sectors of the device's memory in part where numbers are
    # narrow, or of one axis.
    x = results[key]
    return key not in in_place and (len(x.shape) < 2 or x.dtype.itemsize < 4)

  operands = list(operands)
  taken = num_bytes(fixed, 1) + _SPARE
  room = LIMIT - taken
  choices = [(x, room) for x in ((2, 2), (2, 1), (2, 0), (1, 1), (1, 0))]
  if steps == 1:
    choices = choices[-1:]
  elif blocks > MULTIPROCESSORS:
    choices = [(x, _HALF - taken) for x, _ in choices[:3]] + choices
  for (given, found), free in choices:
    held = {key: found or int(placed(key)) for key in results}
    needed = num_bytes(operands, given) + sum(
      num_bytes([results[key]], n) for key, n in held.items()
    )
    if needed <= free:
      return Slots(given, held)
  raise NotImplementedError(
    f"{kernel} mosaic_gpu: a tile needs {num_bytes(operands, 1):,} bytes of "
    f"shared memory, where {room:,} are free; take a shorter tile"
  )
