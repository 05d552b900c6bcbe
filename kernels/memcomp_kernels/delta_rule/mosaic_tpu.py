"""The delta rule by TPU kernels that read tokens in the inputs' layout."""

import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.delta_rule import reference
from memcomp_kernels.pallas_tpu.affine import engine, prepared


def tokens(form: form_lib.Form, inputs: reference.Inputs) -> engine.Tokens:
  """Converts inputs to the tokens of `pallas_tpu.affine.engine`."""
  return engine.Tokens(
    query=inputs.query,
    key=inputs.key,
    value=inputs.value,
    log_decay=inputs.log_decay[..., 0].astype(jnp.float32),
    rate=inputs.write_rate[..., 0],
    read="after",
    dtype=inputs.query.dtype,
    erase=True,
    scale=contract.read_scale(form.spec, inputs.key.shape[-1]),
  )


ENGINE = engine.engine(tokens, prepared.ENGINE)
unsupported = prepared.unsupported
