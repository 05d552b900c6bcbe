"""An upper bound on how far one write of Trellis changes its own read.

A write of the vector w changes what the memory returns for it, z = M w, to

  z' = beta z - gamma |w|^2 J^T (phi(z) - alpha),   J = J_phi(z)

Let phi(z*) = alpha, so that z* is the target. Near it and without decay, z' -
z* = (I - gamma |w|^2 J^T J) (z - z*). This is a contraction if gamma |w|^2
|J|^2 < 2, and does not overshoot below 1. |J| depends on z, but has a bound s
that does not (`activations.steepness`, about 1 / sqrt(phi_eps)). With x = |w|^2
s^2,

  gamma' = gamma b / (b + gamma x)        so that gamma' x < b

hardly changes small rates, and is smooth in all of its arguments.

The bound holds for a single write. With chunk-start gradients, the writes of a
chunk do not see each other. If C of them repeat w, their rates add up. The
bound also does not limit the gradient terms that curvature adds through the
recurrence.
"""

import jax.numpy as jnp

from memcomp_kernels import trellis
from memcomp_kernels.math import activations


def bound(
  inputs: trellis.Inputs, spec: trellis.Spec, largest: float
) -> trellis.Inputs:
  """Returns the inputs with the write rate of each pass bounded.

  Args:
    inputs: arrays `[batch, time, heads, ...]`.
    spec: the memory's spec.
    largest: b > 0, the upper bound of rate * |written|^2 * s^2.
  """
  rate = inputs.write_rate
  squares = [
    jnp.sum(jnp.square(written.astype(rate.dtype)), axis=-1)
    for written in (inputs.key, inputs.value)
  ]
  steepness = activations.steepness(spec.phi, spec.eps(inputs.log_phi_eps))
  product = rate * jnp.stack(squares, axis=-1) * steepness**2
  return inputs._replace(write_rate=rate * largest / (largest + product))
