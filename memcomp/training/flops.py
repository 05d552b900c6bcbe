"""Model flops of a training step, and the device's peak."""

import math

import jax
from flax import nnx

from memcomp.models import abstract, decoder, overview

PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  # One jax device is one of the chip's two cores.
  "TPU7x": 1153.5e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H200": 989e12,
}
"""Dense bf16 flop/s of one jax device by `device_kind`, as vendors state."""


def matmul_params(model: abstract.Model) -> int:
  """Returns N: the parameters that multiply activations as matrices.

  These are the parameters with weight decay (norms, biases, convolutions and
  initial memories have none), less the embedding table where the head has a
  matrix of its own: a lookup multiplies nothing, a tied table is the head.
  """
  variables = nnx.to_flat_state(model.variables)
  sizes = {
    path: math.prod(v.shape)
    for path, v in variables
    if v.get_metadata("weight_decay", False)
  }
  if ("head",) in sizes:
    del sizes[("embedding",)]
  return sum(sizes.values())


def per_token(
  config: decoder.DecoderConfig, model: abstract.Model, length: int
) -> int:
  """Returns the model flops of training on one token of `length`.

      6 N + 3 M

  N: `matmul_params`, multiplied and added once forward (2 N) and twice
  backward (4 N). M: the memory's own flops forward per token, all layers
  (`overview.memory_flops_per_token`), whose backward is counted as twice that.
  Recomputation (remat, first passes run again) is not counted.
  """
  return 6 * matmul_params(model) + 3 * overview.memory_flops_per_token(
    config, length
  )


def utilisation(
  flops_per_second: float, devices: list[jax.Device]
) -> float | None:
  """Returns the share of the devices' peak (MFU), None where unknown."""
  peak = PEAK_FLOPS.get(devices[0].device_kind)
  return flops_per_second / (peak * len(devices)) if peak else None
