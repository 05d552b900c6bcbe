"""Decays and rates of both passes, computed from the inputs."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
  from memcomp_kernels.two_pass_delta import reference

Gates = tuple[jax.Array, jax.Array]


def of_passes(
  inputs: "reference.Inputs", spec: "reference.Spec", dtype: jnp.dtype
) -> tuple[Gates, Gates]:
  """Returns (decay, rate), each `[..., 1]`, of the first and second pass.

  The decay is 1 - alpha - theta lambda, but at least 0. A token that is not
  active has decay 1 and rate 0.
  """
  kept = jnp.exp(inputs.log_decay.astype(dtype))
  rate = inputs.write_rate.astype(dtype)
  rates = rate[..., :1], rate[..., -1:]

  def gates(rate, weight_decay):
    decay = jnp.maximum(kept - weight_decay * rate, 0)
    if inputs.active is None:
      return decay, rate
    active = inputs.active > 0.5
    return jnp.where(active, decay, 1), jnp.where(active, rate, 0)

  return (
    gates(rates[0], spec.key_weight_decay),
    gates(rates[1], spec.value_weight_decay),
  )
