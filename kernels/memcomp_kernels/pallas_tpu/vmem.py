"""Counts the VMEM that a TPU kernel takes."""

import math
from typing import Any

LIMIT = 64 * 2**20
"""Bytes that a kernel may use; v5e and v6e have 128 MiB, v5p has 64 MiB."""


def num_bytes(blocks: list[tuple[Any, Any]], scratch: list[Any]) -> int:
  """Returns the bytes of a kernel's blocks (two buffers each) and scratch.

  Args:
    blocks: Arrays (or their shapes), each with its block spec.
    scratch: Memory references.
  """
  size = 0
  for array, spec in blocks:
    size += 2 * math.prod(spec.block_shape) * array.dtype.itemsize
  for reference in scratch:
    size += math.prod(reference.shape) * reference.dtype.itemsize
  return size


def too_large(needed: int, name: str, fix: str) -> str | None:
  """Returns why a kernel's blocks cannot fit, or None if they fit.

  Args:
    needed: Bytes that the kernel needs.
    name: Name of the kernel.
    fix: What the user can do about it.
  """
  if needed <= LIMIT:
    return None
  return f"{name} needs {needed:,} bytes of VMEM, more than {LIMIT:,}: {fix}"


def check(needed: int, name: str, fix: str) -> None:
  """Raises NotImplementedError with the reason of `too_large`, if any."""
  if reason := too_large(needed, name, fix):
    raise NotImplementedError(reason)
