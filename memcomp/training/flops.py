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
  # One JAX device is one of the chip's two cores.
  "TPU7x": 1153.5e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H200": 989e12,
}
"""Dense bf16 flop/s of one JAX device by `device_kind`, from the vendors."""


def matmul_params(model: abstract.Model) -> int:
  """Returns N: the number of parameters in matrix products with activations.

  These are the parameters with weight decay (not norms, biases, convolutions or
  initial memories). The embedding table is excluded if the head has its own
  matrix, because a lookup multiplies nothing. A tied table is the head.
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
  """Returns the model flops of training per token of `length`.

      6 N + 3 M

  N is `matmul_params`: one multiply-add each in the forward pass (2 N) and two
  in the backward pass (4 N). M is the forward flops of all memories per token
  (`overview.memory_flops_per_token`); the backward pass counts as twice that.
  Recomputation (remat, repeated first passes) is not counted.
  """
  return 6 * matmul_params(model) + 3 * overview.memory_flops_per_token(
    config, length
  )


def utilisation(
  flops_per_second: float, devices: list[jax.Device]
) -> float | None:
  """Returns the share of the devices' peak (MFU); None if unknown."""
  peak = PEAK_FLOPS.get(devices[0].device_kind)
  return flops_per_second / (peak * len(devices)) if peak else None
