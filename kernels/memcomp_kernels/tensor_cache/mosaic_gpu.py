"""Tensor Cache by GPU kernels: affine tiles and cuDNN's attention."""

from memcomp_kernels import dispatch
from memcomp_kernels.pallas_gpu.affine import prepared
from memcomp_kernels.softmax_attention import library_gpu
from memcomp_kernels.tensor_cache import affine_form

_ENGINES = prepared.ENGINE, prepared.CHUNK_ENGINE


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := prepared.unsupported(call):
    return reason
  spec = call.spec
  if spec.chunked and spec.chunk_size > prepared.TOKENS:
    return f"chunk_size={spec.chunk_size} is more than {prepared.TOKENS}"
  return affine_form.unsupported(spec)


chunk = affine_form.implementation(_ENGINES, library_gpu)
