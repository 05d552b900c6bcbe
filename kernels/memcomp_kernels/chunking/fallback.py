"""Kernels that see only afterwards whether their numbers stayed in range.

Where they did not, the XLA form does the call again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import tile_scan

LOWEST = -60.0
"""Of a tile's sums of log decays that are taken apart: exp of twice as much is
a float32."""


def forward(
  failed: jax.Array,
  form: form_lib.Form,
  layout: Any,
  operands: form_lib.Operands,
  result: form_lib.Result,
) -> form_lib.Result:
  """`result`, of a kernel, or the XLA form's where `failed`."""
  return lax.cond(
    failed,
    lambda: tile_scan.ENGINE.forward(form, layout, operands, False)[0],
    lambda: result,
  )


def backward(
  failed: jax.Array,
  form: form_lib.Form,
  layout: Any,
  operands: form_lib.Operands,
  cotangents: form_lib.Result,
  by_kernel: Callable[[], form_lib.Operands],
) -> form_lib.Operands:
  """`by_kernel()`, or the XLA form's adjoints where `failed`."""

  def again():
    engine = tile_scan.ENGINE
    _, saved = engine.forward(form, layout, operands, True)
    return engine.backward(form, layout, operands, saved, cotangents)

  return lax.cond(failed, again, by_kernel)
