"""Tensor Cache by TPU kernels: affine tiles and splash attention."""

import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.pallas_tpu.affine import engine, prepared
from memcomp_kernels.softmax_attention import library_tpu
from memcomp_kernels.tensor_cache import affine_form, reference, tile


def tokens(
  form: form_lib.Form, inputs: reference.Inputs
) -> engine.Tokens | None:
  """Converts inputs to the tokens of `pallas_tpu.affine.engine`, or None.

  None means that these kernels cannot run the call. Either slots are routed, or
  the delta rule reads the memory after the write but erases before it.
  """
  spec = form.spec
  erase = spec.rule == "delta"
  if inputs.write_route is not None or (erase and spec.read_after_write):
    return None
  read = "after" if spec.read_after_write else "before"
  return engine.Tokens(
    query=inputs.query,
    key=inputs.key,
    # Timescales are heads that share everything else.
    value=jnp.repeat(inputs.value, spec.timescales, axis=2),
    log_decay=inputs.log_decay.reshape(*inputs.log_decay.shape[:2], -1),
    rate=inputs.write_rate.reshape(*inputs.write_rate.shape[:2], -1),
    read="start" if spec.chunked else read,
    dtype=affine_form.output_dtype(spec, inputs.query.dtype, jnp.float32),
    erase=erase,
  )


ENGINES = (
  engine.engine(tokens, prepared.ENGINE),
  engine.engine(tokens, prepared.CHUNK_ENGINE),
)


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := launch.unavailable():
    return reason
  if reason := affine_form.unsupported(call.spec):
    return reason
  if reason := contract.wrong_dtypes(call.inputs, "bfloat16", "float32"):
    return reason
  spec = call.spec
  if spec.chunked:
    return prepared.too_large(call, spec.chunk_size)
  return prepared.too_large(
    call, tile.tile_time(spec, call.inputs.query.shape[1])
  )


ENGINE = affine_form.kernels(ENGINES, library_tpu)
