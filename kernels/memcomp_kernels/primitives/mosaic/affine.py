"""Memories whose tiles are affine, by TPU kernels: `primitives.affine_engine`.

`ENGINE` is for updates that are not defined by chunk, `CHUNK_ENGINE` for those
that are.
"""

import functools
from typing import Any

from memcomp_kernels import contract
from memcomp_kernels.primitives import affine_engine
from memcomp_kernels.primitives.mosaic import affine_kernels, modes

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
  return contract.wrong_dtypes(inputs, "bfloat16", "float32")


implementation = functools.partial(
  affine_engine.implementation, "mosaic_tpu", ENGINE, unsupported
)
"""(memory's name, its XLA form) -> its `chunk` by these kernels."""
