"""Tensor Cache by GPU kernels: affine tiles and cuDNN's attention."""

import functools

from memcomp_kernels.primitives.mosaic_gpu import affine, affine_kernels
from memcomp_kernels.softmax_attention import library_gpu
from memcomp_kernels.tensor_cache import affine_memory, types

_ENGINES = affine.ENGINE, affine.CHUNK_ENGINE


def unsupported(inputs: types.Inputs, spec: types.Spec) -> str | None:
  """Why the kernels cannot do a call here, or None."""
  if reason := affine.unsupported(inputs, spec):
    return reason
  if spec.chunked and spec.chunk_size > affine_kernels.TOKENS:
    return f"chunk_size={spec.chunk_size} is more than {affine_kernels.TOKENS}"
  return affine_memory.unsupported(spec)


chunk = affine_memory.implementation(
  "mosaic_gpu", _ENGINES, library_gpu, unsupported
)
memory = functools.partial(affine_memory.memory, _ENGINES)
