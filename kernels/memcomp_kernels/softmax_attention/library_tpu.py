"""Softmax attention by splash attention, a TPU kernel that is part of JAX.

`jax.experimental.pallas.ops.tpu.splash_attention` is flash attention, forward
and backward, over only the blocks that a mask allows. Groups of queries share
keys and values. Segment ids separate packed rows; here they are the runs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)

from memcomp_kernels import contract, derivative, dispatch, window
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.softmax_attention import fresh, reference, tile

# Least and greatest tokens per block. The cost of a token is that of its tile's
# keys, so a small window has small tiles.
_TILE, _WIDEST_TILE = 128, 512

_WIDTH = 64  # head dims must be multiples of this; others were not compiled
_WIDEST = 256


class _Mask(masks.Mask):
  """The mask of `tile.sees`, which the kernel computes from indices."""

  def __init__(self, spec: reference.Spec, time: int, ring: int):
    self._key = spec, time, ring
    self.q_sequence = np.arange(time, dtype=np.int32)
    self.mask_function = functools.partial(tile.sees, spec=spec, ring=ring)

  @property
  def shape(self) -> tuple[int, int]:
    return self.q_sequence.size, self.q_sequence.size

  def __getitem__(self, idx) -> np.ndarray:
    rows, columns = (self.q_sequence[i] for i in idx)
    return np.asarray(self.mask_function(rows[:, None], columns[None]))

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Mask) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)


def _mask(
  spec: reference.Spec, time: int, padded: int, size: int
) -> masks.Mask:
  """Returns the mask that needs the fewest comparisons."""
  shape = padded, padded
  if fresh.sees_all(spec, time, size):
    return masks.CausalMask(shape)
  ring = size - spec.sink_tokens
  if spec.sink_tokens or spec.chunk_size is not None:
    return _Mask(spec, padded, ring)
  return masks.LocalMask(shape, (ring - 1, 0), 0)


def _kernel(mask: masks.Mask, heads: int, block: int) -> Any:
  """Returns the kernel of one row.

  Its mask's tables take seconds to build for 32k tokens. JAX caches the tables
  of equal masks.
  """
  sizes = splash.BlockSizes(
    block_q=block,
    block_kv=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  return splash.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=derivative.SAVED,
    interpret=bool(launch.interpret()),
  )


def _with_precision(function: Callable, precision: str) -> Callable:
  """Returns a function whose matmuls, and its gradient's, have a precision.

  The kernel's own numbers have 32 bits where the program's have 64, too.
  """

  def within(call, *arguments):
    with jax.default_matmul_precision(precision), jax.enable_x64(False):
      return call(*arguments)

  def run(*arguments):
    return within(function, *arguments)

  def forward(*arguments):
    return within(jax.vjp, function, *arguments)

  def backward(pullback, cotangent):
    return within(pullback, cotangent)

  return derivative.custom_vjp(run, forward, backward)


def _block(time: int, size: int) -> int:
  """Returns tokens per block, which divide `time`.

  Args:
    time: a multiple of `_TILE`.
    size: maximum number of tokens that a token sees, sinks included.
  """
  block = _TILE
  while 2 * block <= min(_WIDEST_TILE, size) and time % (2 * block) == 0:
    block *= 2
  return block


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  run: jax.Array | None,
  *,
  spec: reference.Spec,
  size: int,
) -> jax.Array:
  """Computes attention; see `fresh.Attend`."""
  time, heads, dim = query.shape[1:]
  padding = -time % _TILE
  scale = contract.read_scale(spec, dim)
  # The scaling is in float32, because rounding the scale itself would shift all
  # scores by the same factor.
  query = (scale * query.astype(jnp.float32)).astype(query.dtype)

  def by_head(x):
    x = jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)])
    return jnp.swapaxes(x, 1, 2)

  ids = None
  if run is not None:
    run = jnp.pad(run, [(0, 0), (0, padding)], constant_values=window.PADDING)
    ids = splash.SegmentIds(run, run)
  mask = _mask(spec, time, time + padding, size)
  block = _block(time + padding, size)

  def rows(*arguments):
    return jax.vmap(_kernel(mask, heads, block))(*arguments)

  # By default, TPUs round float32 operands to bfloat16. Who passes float32
  # wants its precision.
  precision = "default" if query.dtype == jnp.bfloat16 else "highest"
  outputs = _with_precision(rows, precision)(
    by_head(query), by_head(key), by_head(value), ids
  )
  return jnp.swapaxes(outputs, 1, 2)[:, :time]


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernel cannot run a call, or None if it can."""
  if reason := launch.unavailable():
    return reason
  if reason := fresh.unsupported(call):
    return reason
  inputs = call.inputs
  for name, x in (("key_dim", inputs.key), ("value_dim", inputs.value)):
    if x.shape[-1] % _WIDTH or x.shape[-1] > _WIDEST:
      return (
        f"{name}={x.shape[-1]} is not a multiple of {_WIDTH} up to {_WIDEST}"
      )
  return contract.wrong_dtypes(inputs, "bfloat16", "float32")


chunk = fresh.implementation(attend)
