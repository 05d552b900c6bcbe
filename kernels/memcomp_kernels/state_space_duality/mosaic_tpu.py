"""State space duality by TPU kernels that read tokens in the inputs' layout."""

import jax.numpy as jnp

from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.pallas_tpu.affine import engine, prepared
from memcomp_kernels.state_space_duality import reference


def tokens(form: form_lib.Form, inputs: reference.Inputs) -> engine.Tokens:
  """Converts inputs to the tokens of `pallas_tpu.affine.engine`."""
  del form
  skip = inputs.skip
  return engine.Tokens(
    query=inputs.query,
    key=inputs.key,
    value=inputs.value,
    log_decay=inputs.log_decay[..., 0].astype(jnp.float32),
    rate=inputs.write_rate[..., 0],
    read="after",
    dtype=inputs.query.dtype,
    skip=None if skip is None else skip[..., 0],
  )


ENGINE = engine.engine(tokens, prepared.ENGINE)
unsupported = prepared.unsupported
