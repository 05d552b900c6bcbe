"""A bound on how far one write of Trellis can move its own answer.

What the memory answers to a written vector w, z = M w, is moved by the write:

  z' = beta z - gamma |w|^2 J^T (phi(z) - alpha),   J = J_phi(z)

Near an answer that fits, phi(z*) = alpha, and without decay this is z' - z* =
(I - gamma |w|^2 J^T J) (z - z*): a contraction if gamma |w|^2 |J|^2 < 2, free
of overshoot below 1. |J| depends on z, but has a bound s that does not
(`activations.steepness`, about 1 / sqrt(phi_eps)). With x = |w|^2 s^2,

  gamma' = gamma b / (b + gamma x)        so that gamma' x < b

leaves small rates as they are, and is smooth in all it depends on.

It bounds a single write. With gradients at the chunk start the writes of a
chunk do not see each other: where C of them repeat w, their rates add up.
Nor does it bound what curvature adds to gradients through the recurrence.
"""

import jax.numpy as jnp

from memcomp_kernels.math import activations
from memcomp_kernels.trellis import api as trellis


def bound(
  inputs: trellis.Inputs, spec: trellis.Spec, largest: float
) -> trellis.Inputs:
  """Returns the inputs with a bounded write rate for each pass.

  Args:
    inputs: `[batch, time, heads, ...]`.
    spec: the memory's meaning.
    largest: b > 0, of rate * |written|^2 * s^2.
  """
  rate = inputs.write_rate
  squares = [
    jnp.sum(jnp.square(written.astype(rate.dtype)), axis=-1)
    for written in (inputs.key, inputs.value)
  ]
  steepness = activations.steepness(spec.phi, spec.eps(inputs.log_phi_eps))
  product = rate * jnp.stack(squares, axis=-1) * steepness**2
  return inputs._replace(write_rate=rate * largest / (largest + product))
