"""How much on-chip memory a TPU kernel takes."""

import math
from typing import Any

LIMIT = 64 * 2**20
"""Bytes that a kernel may ask for; v5e and v6e have 128 MiB, v5p 64."""


def num_bytes(blocks: list[tuple[Any, Any]], scratch: list[Any]) -> int:
  """Bytes of a kernel's blocks, in two buffers each, and of its scratch.

  Args:
    blocks: arrays (or their shapes) with the block specs of each.
    scratch: memory references.
  """
  size = 0
  for array, spec in blocks:
    size += 2 * math.prod(spec.block_shape) * array.dtype.itemsize
  for reference in scratch:
    size += math.prod(reference.shape) * reference.dtype.itemsize
  return size


def too_large(needed: int, name: str, fix: str) -> str | None:
  """Why a kernel's blocks cannot fit, or None.

  Args:
    needed: bytes.
    name: of the kernel.
    fix: what to do about it.
  """
  if needed <= LIMIT:
    return None
  return f"{name} needs {needed:,} bytes of VMEM, more than {LIMIT:,}: {fix}"


def check(needed: int, name: str, fix: str) -> None:
  """Raises NotImplementedError with the reason of `too_large`, if any."""
  if reason := too_large(needed, name, fix):
    raise NotImplementedError(reason)
