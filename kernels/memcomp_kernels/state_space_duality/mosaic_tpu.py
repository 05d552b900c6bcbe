"""State space duality by TPU kernels, which read tokens where they lie."""

import jax.numpy as jnp

from memcomp_kernels.primitives import form as form_lib
from memcomp_kernels.primitives.mosaic import affine, by_token
from memcomp_kernels.state_space_duality import types, xla_chunked


def tokens(form: form_lib.Form, inputs: types.Inputs) -> by_token.Tokens:
  """Of `primitives.mosaic.outer`."""
  del form
  skip = inputs.skip
  return by_token.Tokens(
    query=inputs.query,
    key=inputs.key,
    value=inputs.value,
    log_decay=inputs.log_decay[..., 0].astype(jnp.float32),
    rate=inputs.write_rate[..., 0],
    read="after",
    dtype=inputs.query.dtype,
    skip=None if skip is None else skip[..., 0],
  )


ENGINE = by_token.engine(tokens, affine.ENGINE)

chunk = affine.implementation("state_space_duality", xla_chunked.chunk, ENGINE)
unsupported = affine.unsupported
