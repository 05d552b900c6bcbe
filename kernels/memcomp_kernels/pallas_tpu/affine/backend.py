"""Memories whose tiles are affine, by TPU kernels: `chunking.prepared_engine`.

`ENGINE` is for updates that are not defined by chunk, `CHUNK_ENGINE` for those
that are.
"""

from collections.abc import Callable
from typing import Any

import jax

from memcomp_kernels import contract
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import prepared_engine
from memcomp_kernels.pallas_tpu import device
from memcomp_kernels.pallas_tpu.affine import prepared

ENGINE, CHUNK_ENGINE = (
  prepared_engine.engine(prepared.forward, prepared.backward, by_chunk=by_chunk)
  for by_chunk in (False, True)
)


def unsupported(inputs: Any, spec: Any) -> str | None:
  """Why the kernels cannot do a call here, or None."""
  del spec
  if reason := device.unavailable():
    return reason
  return contract.wrong_dtypes(inputs, "bfloat16", "float32")


def implementation(
  memory: str,
  chunk: Callable[..., Any],
  engine: form_lib.Engine = ENGINE,
) -> Callable[..., tuple[Any, jax.Array]]:
  """Returns a memory's `chunk` by kernels: its XLA form by an engine."""
  return prepared_engine.implementation(
    "mosaic_tpu", engine, unsupported, memory, chunk
  )
