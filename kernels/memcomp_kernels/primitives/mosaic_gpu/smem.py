"""What a kernel may hold in a multiprocessor's shared memory."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

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
) -> Slots:
  """What shared memory has room for; the next step's operands come first.

  Results are without a slot only where the next step's operands, or this one's,
  would have no room beside them; or where there is one step, which leaves as
  much room as it can to other blocks of threads.

  Args:
    operands: a step's part of each.
    results: likewise, by name.
    fixed: other arrays, once each.
    kernel: whose they are.
    in_place: results that may take an operand's place.
    steps: how many there are.

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
  room = LIMIT - _SPARE - num_bytes(fixed, 1)
  choices = ((2, 2), (2, 1), (2, 0), (1, 1), (1, 0))
  for given, found in choices if steps > 1 else choices[-1:]:
    held = {key: found or int(placed(key)) for key in results}
    needed = num_bytes(operands, given) + sum(
      num_bytes([results[key]], n) for key, n in held.items()
    )
    if needed <= room:
      return Slots(given, held)
  raise NotImplementedError(
    f"{kernel} mosaic_gpu: a tile needs {num_bytes(operands, 1):,} bytes of "
    f"shared memory, where {room:,} are free; take a shorter tile"
  )
