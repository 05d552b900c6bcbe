"""Memories whose tiles are affine, by GPU kernels: `primitives.affine_engine`.

`ENGINE` is for updates that are not defined by chunk, `CHUNK_ENGINE` for those
that are.
"""

import functools
from typing import Any

from memcomp_kernels import contract
from memcomp_kernels.primitives import affine_engine
from memcomp_kernels.primitives.mosaic_gpu import affine_kernels, modes

ENGINE, CHUNK_ENGINE = (
  affine_engine.engine(
    affine_kernels.forward, affine_kernels.backward, by_chunk=by_chunk
  )
  for by_chunk in (False, True)
)


def unsupported(inputs: Any, spec: Any) -> str | None:
  """Why the kernels cannot do a call here, or None."""
  del spec
  if reason := modes.unavailable():
    return reason
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  key_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
  if key_dim not in affine_kernels.KEY_DIMS:
    return f"key_dim={key_dim} is none of {affine_kernels.KEY_DIMS}"
  if value_dim % affine_kernels.COLUMNS:
    return f"value_dim={value_dim} is no multiple of {affine_kernels.COLUMNS}"
  return None


implementation = functools.partial(
  affine_engine.implementation, "mosaic_gpu", ENGINE, unsupported
)
"""(memory's name, its XLA form) -> its `chunk` by these kernels."""
