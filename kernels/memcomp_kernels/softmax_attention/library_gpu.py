"""Softmax attention by cuDNN, through `jax.nn.dot_product_attention`.

This is flash attention, forward and backward, causal or over a sliding window.
Groups of queries share keys and values. cuDNN would need segments as a mask
over pairs of tokens in memory, so the XLA form runs packed rows.
"""

import re
from typing import Literal

import jax

from memcomp_kernels import contract, dispatch
from memcomp_kernels.softmax_attention import fresh, reference

_WIDTH = 8  # head dims must be multiples of this
_WIDEST = 128  # largest head dim that all supported GPUs can run
_LEAST_CAPABILITY = 8  # Ampere


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  run: None,
  *,
  spec: reference.Spec,
  size: int,
  implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
  """Computes attention of one run of tokens; see `fresh.Attend`.

  `implementation` is that of `jax.nn.dot_product_attention`.
  """
  del run
  local = None if fresh.sees_all(spec, query.shape[1], size) else (size - 1, 0)
  return jax.nn.dot_product_attention(
    query,
    key,
    value,
    scale=spec.scale,
    is_causal=True,
    local_window_size=local,
    implementation=implementation,
  )


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernel cannot run a call, or None if it can."""
  if reason := _unavailable():
    return reason
  state, inputs, spec, segment_ids = call[:4]
  if segment_ids is not None:
    return "packed rows (segment_ids) would need a mask of time x time"
  if reason := fresh.unsupported(call):
    return reason
  if not fresh.sees_all(spec, inputs.query.shape[1], state.keys.shape[2]):
    for name in ("sink_tokens", "chunk_size"):
      if getattr(spec, name):
        return f"cuDNN has no mask for {name}={getattr(spec, name)}"
  dim, value_dim = inputs.key.shape[-1], inputs.value.shape[-1]
  if dim != value_dim:
    return f"key_dim={dim} and value_dim={value_dim} must be equal"
  if dim % _WIDTH or dim > _WIDEST:
    return f"key_dim={dim} is not a multiple of {_WIDTH} up to {_WIDEST}"
  return contract.wrong_dtypes(inputs, "bfloat16")


chunk = fresh.implementation(attend)


def _unavailable() -> str | None:
  """Returns why cuDNN's attention cannot run here, or None if it can."""
  platform = dispatch.current_platform()
  if platform != "gpu":
    return f"it is a GPU kernel, and the devices in use are of {platform}"
  capability = getattr(dispatch.default_device(), "compute_capability", None)
  major = re.match(r"\d+", str(capability))
  if major is None or int(major[0]) < _LEAST_CAPABILITY:
    return f"compute capability {capability} is not one of NVIDIA's from 8.0 on"
  return None
