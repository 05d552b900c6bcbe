"""Memories whose tiles are affine, by GPU kernels: `chunking.prepared_engine`.

`ENGINE` is for updates that are not defined by chunk, `CHUNK_ENGINE` for those
that are.
"""

import functools
from typing import Any

from memcomp_kernels import contract
from memcomp_kernels.chunking import prepared_engine
from memcomp_kernels.pallas_gpu import device
from memcomp_kernels.pallas_gpu.affine import prepared

ENGINE, CHUNK_ENGINE = (
  prepared_engine.engine(prepared.forward, prepared.backward, by_chunk=by_chunk)
  for by_chunk in (False, True)
)


def unsupported(inputs: Any, spec: Any) -> str | None:
  """Why the kernels cannot do a call here, or None."""
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


implementation = functools.partial(
  prepared_engine.implementation, "mosaic_gpu", ENGINE, unsupported
)
"""(memory's name, its XLA form) -> its `chunk` by these kernels."""
