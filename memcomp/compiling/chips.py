"""TPUs to compile for, which need not be attached."""

import jax

from memcomp import errors
from memcomp_kernels import aot

HBM_BYTES = {
  "TPU v4": 32 * 2**30,
  "TPU v5 lite": 16 * 2**30,
  "TPU v5": 95 * 2**30,
  "TPU v6 lite": 32 * 2**30,
  "TPU7x": 96 * 2**30,
}
"""Main memory of one JAX device by `device_kind`, from the vendor. On TPU7x, a
device is one of a chip's two cores."""


def devices(topology: str, slices: int = 1) -> list[jax.Device]:
  """The chips of a topology, for compilation only.

  Args:
    topology: for example "v5e:16x16", "v5p:4x4x4", "v6e:16x16" or
      "tpu7x:2x2x2".
    slices: number of slices of that topology, >= 1.

  Raises:
    UserError: the topology is unknown, or there is no TPU compiler here.
  """
  if not aot.available():
    raise errors.UserError(
      "--compile_only needs the TPU compiler, which is not installed; pip"
      " install 'memcomp[aot]'"
    )
  try:
    return aot.devices(topology, slices)
  except RuntimeError as error:
    raise errors.UserError(
      f"--topology={topology}: {error}; topologies are written v5e:16x16,"
      " v5p:4x4x4, v6e:16x16 or tpu7x:2x2x2"
    ) from error


def hbm_bytes(device: jax.Device) -> int | None:
  """Main memory of a device; None if unknown."""
  return HBM_BYTES.get(device.device_kind)
