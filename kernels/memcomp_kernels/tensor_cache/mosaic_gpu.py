"""Tensor Cache by GPU kernels: affine tiles and cuDNN's attention."""

from memcomp_kernels import dispatch
from memcomp_kernels.pallas_gpu import full_tiles
from memcomp_kernels.pallas_gpu.affine import prepared
from memcomp_kernels.softmax_attention import library_gpu
from memcomp_kernels.tensor_cache import affine_form

_ENGINES = prepared.ENGINE, prepared.CHUNK_ENGINE


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := prepared.unsupported(call):
    return reason
  spec = call.spec
  if spec.chunked and (
    reason := full_tiles.too_large(spec.chunk_size, widths={})
  ):
    return reason
  return affine_form.unsupported(spec)


ENGINE = affine_form.kernels(_ENGINES, library_gpu)
