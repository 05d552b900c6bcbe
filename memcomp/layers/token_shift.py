"""Token shift: learned interpolation between each token and the previous one.

The state is `[batch, channels]`, the input of the last valid token.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from memcomp import sharding
from memcomp.layers import halo, linear
from memcomp_kernels import contract


def token_shift(
  x: jax.Array,
  amount: jax.Array,
  last: jax.Array,
  *,
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  first: str,
  rules: sharding.Rules = sharding.NONE,
) -> tuple[jax.Array, jax.Array]:
  """y_t = x_t + amount * (x_{t-1} - x_t), within a segment.

  Args:
    x: `[batch, time, channels]`.
    amount: `[channels]`.
    last: `[batch, channels]`, the input before the first token.
    segment_ids: `[batch, time]`; 0 is padding, which is skipped.
    segment_id: `[batch]`, segment of `last`; 0 for none.
    first: what precedes a segment's first token, "zero" or "itself".
    rules: sharding of batch and time.

  Returns:
    y `[batch, time, channels]`, and the x of the last valid token.
  """
  if not x.shape[1]:
    return x, last

  def local(x, taps, amount, segment_ids, segment_id):
    y, last = _shift(x, amount, taps[:, 0], segment_ids, segment_id, first)
    return y, last[:, None]

  y, taps = halo.run_sharded(
    local, x, last[:, None], amount, segment_ids, segment_id, rules
  )
  return y, taps[:, 0]


def _shift(x, amount, last, segment_ids, segment_id, first):
  time = x.shape[1]
  known = segment_id != 0
  if segment_ids is None:
    before = jnp.concatenate([last[:, None].astype(x.dtype), x[:, :-1]], axis=1)
    exists = jnp.arange(time) > 0
    exists = exists[None] | known[:, None]
    new_last = x[:, -1]
  else:
    starts, _ = contract.segment_starts(segment_ids, segment_id)
    index = jnp.where(segment_ids != 0, jnp.arange(time), -1)
    latest = lax.cummax(index, axis=1)
    previous = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    before = _take(x, previous, last)
    exists = ~starts & ((previous >= 0) | known[:, None])
    new_last = _take(x, latest[:, -1:], last)[:, 0]
  absent = x if first == "itself" else jnp.zeros_like(x)
  before = jnp.where(exists[..., None], before, absent)
  y = x + amount.astype(x.dtype) * (before - x)
  return y, new_last.astype(last.dtype)


def _take(x, index, last):
  """Tokens of `x` at `index`; `last` for index -1."""
  taken = jnp.take_along_axis(x, jnp.maximum(index, 0)[..., None], axis=1)
  return jnp.where(
    (index >= 0)[..., None], taken, last[:, None].astype(x.dtype)
  )


class TokenShift(nnx.Module):
  """`token_shift` with a learned amount.

  The amount in channel i starts at 1 - (i / channels)^exponent. The first
  channels look back, the last stay (RWKV-7; algorithms of GPTAlpha-2).

  Args:
    channels: number of input channels.
    exponent: exponent at depth 0.
    power: the exponent at depth d in [0, 1) is exponent * (1 - d)^power.
    first: what precedes the first token, "zero" or "itself".
    name: logical name of the channel axis.
  """

  def __init__(
    self,
    channels: int,
    *,
    exponent: float,
    power: int = 1,
    first: str,
    name: str = "act_embed",
  ):
    self.exponent, self.power, self.first = exponent, power, first
    self.channels = channels
    amount = self._amount(0.0)
    self.amount = linear.constant_param(amount, (name,))

  def _amount(self, depth):
    fraction = jnp.arange(self.channels) / self.channels
    return 1 - fraction ** (self.exponent * (1 - depth) ** self.power)

  def at_depth(self, depth: jax.Array) -> None:
    """Reinitializes the amounts for a layer at `depth` in [0, 1)."""
    self.amount[...] = self._amount(depth).astype(self.amount.dtype)

  def init_state(self, batch: int) -> jax.Array:
    """The state before the first token."""
    return jnp.zeros((batch, self.channels), linear.wide_dtype(self.amount))

  def __call__(self, x, last, *, segment_ids, segment_id, rules=sharding.NONE):
    """See `token_shift`."""
    return token_shift(
      x,
      self.amount[...],
      last,
      segment_ids=segment_ids,
      segment_id=segment_id,
      first=self.first,
      rules=rules,
    )
