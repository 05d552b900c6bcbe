"""The algebra of one tile of state space duality, as matrix products.

With L = Omega of `math.decay` (the paper's 1-semiseparable mask) and h before
the tile,

  Y = (L * (C B^T)) diag(dt) X + diag(mu) C h + D X
  h <- mu_C h + B^T diag(L_C dt) X

`affine.outer_tile` computes this with dt X as what is written. C B^T is
computed once per group.
"""

import jax.numpy as jnp

from memcomp_kernels import affine, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.state_space_duality import reference


def prepare(inputs: reference.Inputs, spec: reference.Spec) -> affine.Tile:
  """Computes the part of the tile's algebra that needs no memory matrix.

  Args:
    inputs: `[batch, heads, tile, ...]`; queries and keys have groups as heads.
    spec: unused, because the shapes show the groups.
  """
  del spec
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  value, log_decay, rate = (
    x.astype(wide)
    for x in (inputs.value, inputs.log_decay[..., 0], inputs.write_rate)
  )
  prepared = affine.outer_tile(
    inputs.query, inputs.key, rate * value, log_decay
  )
  if inputs.skip is None:
    return prepared
  skipped = inputs.skip.astype(wide) * value
  return prepared._replace(output=prepared.output + skipped)


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory."""
  return affine.form(prepare, call)


chunk = chunked.implementation(form)
