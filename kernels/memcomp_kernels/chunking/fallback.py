"""Fallback for calls of kernels that turn out to be unsupported at run time.

Whether a kernel supports some calls depends on values, such as decays. The XLA
form then runs these calls again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib

LOWEST = -60.0
"""Lowest sum G of log decays in a tile for which kernels may split decays.

They split exp(G_r - G_i) into two factors. Down to this sum the larger factor
is at most exp(60), about 1e26, which float32 can represent.
"""


def forward(
  failed: jax.Array,
  form: form_lib.Form,
  layout: layout_lib.Layout,
  operands: form_lib.Operands,
  result: form_lib.Result,
) -> form_lib.Result:
  """Returns a kernel's `result`, or the XLA form's if `failed`."""

  def again():
    found, _ = form_lib.ENGINE.forward(form, layout, operands, False)
    return found._replace(stats=result.stats)

  return lax.cond(failed, again, lambda: result)


def backward(
  failed: jax.Array,
  form: form_lib.Form,
  layout: layout_lib.Layout,
  operands: form_lib.Operands,
  cotangents: form_lib.Result,
  by_kernel: Callable[[], form_lib.Operands],
) -> form_lib.Operands:
  """Returns `by_kernel()`, or the XLA form's adjoints if `failed`."""

  def again():
    engine = form_lib.ENGINE
    _, saved = engine.forward(form, layout, operands, True)
    return engine.backward(form, layout, operands, saved, cotangents)

  return lax.cond(failed, again, lambda: filled(by_kernel(), operands))


def filled(
  adjoints: form_lib.Operands, operands: form_lib.Operands
) -> form_lib.Operands:
  """Adds a zero adjoint of `reset_start`, which kernels do not read."""
  if adjoints.reset_start is not None:
    return adjoints
  zeros = jax.tree.map(jnp.zeros_like, operands.reset_start)
  return adjoints._replace(reset_start=zeros)
