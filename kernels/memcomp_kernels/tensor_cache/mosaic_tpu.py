"""Tensor Cache by TPU kernels: affine tiles and splash attention."""

import functools

from memcomp_kernels import contract
from memcomp_kernels.primitives.mosaic import affine, modes
from memcomp_kernels.softmax_attention import library_tpu
from memcomp_kernels.tensor_cache import affine_memory, types

_ENGINES = affine.ENGINE, affine.CHUNK_ENGINE


def unsupported(inputs: types.Inputs, spec: types.Spec) -> str | None:
  """Why the kernels cannot do a call here, or None."""
  if reason := modes.unavailable():
    return reason
  if reason := affine_memory.unsupported(spec):
    return reason
  return contract.wrong_dtypes(inputs, "bfloat16", "float32")


chunk = affine_memory.implementation(
  "mosaic_tpu", _ENGINES, library_tpu, unsupported
)
memory = functools.partial(affine_memory.memory, _ENGINES)
