"""Plans what a kernel holds in a multiprocessor's shared memory."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200. Other Hopper GPUs have fewer, but choices
by this number only affect speed."""
LIMIT = 227 * 1024
"""Bytes that a thread block may use on Hopper (CUDA C Programming Guide, table
of technical specifications per compute capability)."""
_HALF = 113 * 1024  # limit per block if two blocks share a multiprocessor
_SPARE = 3 * 1024  # for reductions over warps, and for barriers
_ALIGNMENT = 1024  # bytes, of each array
_SWIZZLE = 128  # bytes, the widest swizzle


def swizzle(arrays: Iterable[Any]) -> int:
  """Returns the bytes of the swizzle that all operand matrices can have.

  Both operands of a matmul must have the same swizzle.
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
  """Returns the transforms that wgmma needs to read `[..., rows, columns]`.

  There are none if rows are too short for the swizzle.

  Args:
    shape: Shape of the array.
    dtype: Dtype of the array. Four-byte numbers are never operands, and get the
      widest swizzle.
    swizzle: Bytes of the operands' swizzle.
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
  """Returns shared memory that wgmma can read; arguments as in `layout`."""
  return plgpu.SMEM(shape, dtype, transforms=layout(shape, dtype, swizzle))


class Slots(NamedTuple):
  """Number of steps whose arrays shared memory holds at once.

  Attributes:
    operands: Number for operands, 1 or 2.
    results: Number by name, 0 to 2. Results with 0 go directly from registers
      to global memory, or overwrite an operand.
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
  """Chooses slots that fit; the next step's operands have priority.

  A result gets no slot only if the next step's operands, or this step's, would
  otherwise have no room. It also gets none if there is only one step: that
  leaves as much room as possible to other thread blocks. If there are more
  thread blocks than multiprocessors, two blocks share a multiprocessor. They do
  so only if the next step's operands still have room.

  Args:
    operands: Part of each operand that a step reads.
    results: Part of each result that a step writes, by name.
    fixed: Other arrays, which exist once each.
    kernel: Name of the kernel, for errors.
    in_place: Names of results that may overwrite an operand.
    steps: Number of steps per thread block.
    blocks: Number of thread blocks; each runs all of its own steps.

  Raises:
    NotImplementedError: Not even one step's operands fit.
  """

  def num_bytes(arrays, steps):
    sizes = (steps * math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

  def placed(key):
    # If numbers are narrow, or arrays have one axis, stores from registers
    # would write only parts of global memory's sectors.
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
    f"shared memory, where {room:,} are free; take narrower heads"
  )
