"""GPU kernels for memories whose tiles are affine.

They are the GPU's counterpart of `pallas_tpu.affine.backend`.
"""

from typing import Any

from memcomp_kernels import contract
from memcomp_kernels.chunking import prepared_engine
from memcomp_kernels.pallas_gpu import device
from memcomp_kernels.pallas_gpu.affine import prepared

ENGINE, CHUNK_ENGINE = prepared_engine.engines(
  prepared.forward, prepared.backward
)


def unsupported(inputs: Any, spec: Any) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  del spec
  if reason := device.unavailable():
    return reason
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  key_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
  if key_dim not in prepared.KEY_DIMS:
    return f"key_dim={key_dim} is none of {prepared.KEY_DIMS}"
  if value_dim % prepared.COLUMNS:
    return f"value_dim={value_dim} is no multiple of {prepared.COLUMNS}"
  return None
