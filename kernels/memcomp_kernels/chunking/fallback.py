"""Calls that kernels see only when they run that they cannot do.

The XLA form does these calls again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import derivative
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.chunking import tile_scan

LOWEST = -60.0
"""Of a tile's sums of log decays that are taken apart: exp of twice as much is
a float32."""


def forward(
  failed: jax.Array,
  form: form_lib.Form,
  layout: layout_lib.Layout,
  operands: form_lib.Operands,
  result: form_lib.Result,
) -> form_lib.Result:
  """`result`, of a kernel, or the XLA form's where `failed`."""

  def again():
    found, _ = tile_scan.ENGINE.forward(form, layout, operands, False)
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
  """`by_kernel()`, or the XLA form's adjoints where `failed`."""

  def again():
    engine = tile_scan.ENGINE
    _, saved = engine.forward(form, layout, operands, True)
    return engine.backward(form, layout, operands, saved, cotangents)

  return lax.cond(failed, again, lambda: filled(by_kernel(), operands))


def filled(
  adjoints: form_lib.Operands, operands: form_lib.Operands
) -> form_lib.Operands:
  """Adjoints by a kernel, which does not read `reset_start`."""
  if adjoints.reset_start is not None:
    return adjoints
  zeros = jax.tree.map(jnp.zeros_like, operands.reset_start)
  return adjoints._replace(reset_start=zeros)


def guarded(
  engine: form_lib.Engine,
  failed: Callable[..., jax.Array | None] = lambda *_: None,
) -> form_lib.Engine:
  """The engine of kernels that cannot do some calls.

  Args:
    engine: of the kernels.
    failed: (form, layout, operands) -> whether the call, or this page of it, is
      one of these, bool; None if it cannot be.
  """

  def forward_(form, layout, operands, save):
    operands = derivative.once(operands)
    result, saved = engine.forward(form, layout, operands, save)
    found = failed(form, layout, operands)
    if found is not None:
      result = forward(found, form, layout, operands, result)
    return result, saved

  def backward_(form, layout, operands, saved, cotangents):
    operands, cotangents = derivative.once((operands, cotangents))

    def by_kernel():
      return engine.backward(form, layout, operands, saved, cotangents)

    found = failed(form, layout, operands)
    if found is None:
      return filled(by_kernel(), operands)
    return backward(found, form, layout, operands, cotangents, by_kernel)

  return form_lib.Engine(forward_, backward_, engine.as_saved)
