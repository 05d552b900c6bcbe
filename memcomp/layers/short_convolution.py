"""A short causal depthwise convolution, with packing and a state.

The state, called taps, is `[batch, width - 1, channels]`: the inputs of the
last valid tokens, newest last, with zeros before the first token.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from memcomp import sharding
from memcomp.layers import halo, linear
from memcomp_kernels import contract

INITS = ("identity", "uniform")


def short_convolution(
  x: jax.Array,
  weight: jax.Array,
  bias: jax.Array | None,
  taps: jax.Array,
  *,
  segment_ids: jax.Array | None = None,
  segment_id: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """y_t = bias + sum_j weight_j x_{t - (width - 1) + j}, within a segment.

  Args:
    x: `[batch, time, channels]`.
    weight: `[width, channels]`; the last row weights the current token.
    bias: `[channels]`, or None.
    taps: `[batch, width - 1, channels]`, the inputs before the first token.
    segment_ids: `[batch, time]`. 0 is padding, which is skipped. A new segment
      does not see earlier segments.
    segment_id: `[batch]`, segment of the taps; required with `segment_ids`.

  Returns:
    y `[batch, time, channels]`, and the taps after the last token.
  """
  width, time = weight.shape[0], x.shape[1]
  history = jnp.concatenate([taps.astype(x.dtype), x], axis=1)
  weight = weight.astype(x.dtype)
  shift = jnp.zeros((), x.dtype) if bias is None else bias.astype(x.dtype)
  if segment_ids is None:
    y = sum(history[:, j : j + time] * weight[j] for j in range(width))
    return y + shift, history[:, time:].astype(taps.dtype)

  if segment_id is None:
    raise ValueError("segment_ids needs segment_id: whose are the taps?")
  starts, _ = contract.segment_starts(segment_ids, segment_id)
  run = jnp.pad(jnp.cumsum(starts, axis=1), ((0, 0), (width - 1, 0)))
  valid = jnp.pad(
    segment_ids != 0, ((0, 0), (width - 1, 0)), constant_values=True
  )
  # previous[i]: index in `history` of the last valid token before i.
  index = jnp.where(valid, jnp.arange(width - 1 + time), 0)
  latest = lax.cummax(index, axis=1)
  previous = jnp.pad(latest, ((0, 0), (1, 0)))[:, :-1]

  def take(i):
    return jnp.take_along_axis(history, i[..., None], axis=1)

  y = x * weight[-1]
  reach = jnp.broadcast_to(
    jnp.arange(width - 1, width - 1 + time), (x.shape[0], time)
  )
  here = run[:, width - 1 :]
  for j in reversed(range(width - 1)):
    reach = jnp.take_along_axis(previous, reach, axis=1)
    same = jnp.take_along_axis(run, reach, axis=1) == here
    y = y + jnp.where(same[..., None], take(reach), 0) * weight[j]

  # The new taps are the last valid tokens of the last segment.
  last, new_taps = latest[:, -1:], []
  for _ in range(width - 1):
    same = jnp.take_along_axis(run, last, axis=1) == run[:, -1:]
    new_taps.append(jnp.where(same[..., None], take(last), 0))
    last = jnp.take_along_axis(previous, last, axis=1)
  taps = jnp.concatenate(new_taps[::-1], axis=1).astype(taps.dtype)
  return y + shift, taps


class ShortConvolution(nnx.Module):
  """Parameters of `short_convolution`.

  Args:
    channels: number of input channels.
    width: number of taps including the current token, >= 2.
    init: "identity" is near the identity with bias zero. "uniform" is in +-1 /
      sqrt(width), the usual default (Mamba2, DeltaNet).
    bias: whether there is a bias.
    rngs: random streams.
  """

  def __init__(
    self,
    channels: int,
    width: int,
    *,
    init: str = "identity",
    bias: bool = True,
    rngs: nnx.Rngs,
  ):
    if init not in INITS:
      raise ValueError(f"init={init!r} is not one of: {', '.join(INITS)}")
    uniform = init == "uniform"

    def drawn(shape, names, std):
      return linear.normal_param(
        rngs,
        shape,
        names,
        std=std,
        weight_decay=False,
        init="uniform" if uniform else "normal",
      )

    std = (3 * width) ** -0.5 if uniform else 0.5 / width
    noise = drawn((width, channels), (None, "act_embed"), std)
    if not uniform:
      noise[...] = noise[...].at[-1].add(1.0)
    self.weight = noise
    self.bias = nnx.data(None)
    if bias:
      self.bias = drawn((channels,), ("act_embed",), std if uniform else 0.0)
    self.width = width
    self.channels = channels

  def init_state(self, batch: int) -> jax.Array:
    """Zero taps, for before the first token."""
    shape = batch, self.width - 1, self.channels
    return jnp.zeros(shape, linear.wide_dtype(self.weight))

  def __call__(
    self,
    x: jax.Array,
    taps: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    segment_id: jax.Array | None = None,
    rules: sharding.Rules = sharding.NONE,
  ) -> tuple[jax.Array, jax.Array]:
    """See `short_convolution`; `rules` shard batch and time.

    Raises:
      ValueError: the taps are of another width.
    """
    if taps.shape[1:] != (self.width - 1, self.channels):
      raise ValueError(
        f"state: its convolution has [taps, channels]={taps.shape[1:]},"
        f" expected {(self.width - 1, self.channels)}; make it by init_state"
      )
    bias = None if self.bias is None else self.bias[...]

    def local(x, taps, parameters, segment_ids, segment_id):
      weight, bias = parameters
      return short_convolution(
        x,
        weight,
        bias,
        taps,
        segment_ids=segment_ids,
        segment_id=segment_id,
      )

    parameters = self.weight[...], bias
    return halo.run_sharded(
      local, x, taps, parameters, segment_ids, segment_id, rules
    )


def init_taps(
  convolution: ShortConvolution | None, batch: int
) -> jax.Array | None:
  """Zero taps, for before the first token; None without a convolution."""
  return None if convolution is None else convolution.init_state(batch)
