"""GPU kernels for memories whose tiles are affine.

They are the GPU's counterpart of `pallas_tpu.affine.backend`.
"""

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import prepared_engine
from memcomp_kernels.pallas_gpu import device
from memcomp_kernels.pallas_gpu.affine import prepared

ENGINE, CHUNK_ENGINE = prepared_engine.engines(
  prepared.forward, prepared.backward
)


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := device.unavailable():
    return reason
  inputs = call.inputs
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  key_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
  if key_dim not in prepared.KEY_DIMS:
    return f"key_dim={key_dim} is none of {prepared.KEY_DIMS}"
  if value_dim % prepared.COLUMNS:
    return f"value_dim={value_dim} is no multiple of {prepared.COLUMNS}"
  return None
