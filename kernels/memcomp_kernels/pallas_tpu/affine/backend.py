"""TPU kernels for memories whose tiles are affine.

The kernels run as the engines of `chunking.prepared_engine`. `ENGINE` is for
updates whose definition does not depend on chunks, `CHUNK_ENGINE` for updates
that are defined by chunk.
"""

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import prepared_engine
from memcomp_kernels.pallas_tpu import device
from memcomp_kernels.pallas_tpu.affine import prepared

ENGINE, CHUNK_ENGINE = prepared_engine.engines(
  prepared.forward, prepared.backward
)


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := device.unavailable():
    return reason
  return contract.wrong_dtypes(call.inputs, "bfloat16", "float32")
