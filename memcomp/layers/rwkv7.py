"""The RWKV-7 time mixing (arXiv 2503.14456, section 4).

With x_j = x + mu_j (x_{t-1} - x), a learned mu for each j:

  r = x_r W_r, k = x_k W_k, v = x_v W_v mixed with the first layer's
  log w = -e^(-1/2) sigmoid(w0 + tanh(x_w W) W'),  a = sigmoid(a0 + x_a A A')
  kappa^ = unit(k * xi),  k~ = k (1 + (a - 1) alpha)
  p = memory;  y = (GroupNorm(p) + (r . (rho k~)) v) * (sigmoid(x_g G) G') W_o

docs/rwkv7.md explains our choices.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from memcomp.layers import (
  base,
  call_checks,
  linear,
  low_rank,
  options,
  parameters,
  token_shift,
)
from memcomp_kernels import contract, rwkv7
from memcomp_kernels.math import activations
from memcomp_kernels.options import not_negative, one_of, option

VALUE_RESIDUALS = ("none", "dynamic")

# Token shifts, and the exponents of their initial amounts.
_SHIFTS = {
  "query": 0.2,
  "decay": 0.9,
  "key": 0.7,
  "value": 0.7,
  "rate": 0.9,
  "gate": 0.2,
}
_STRONGEST = -math.exp(-0.5)
_NORM_EPS = 1e-5  # times key_dim, as released


@options.config_class
class RWKV7Config(options.MixerConfig):
  """Options of RWKV-7.

  Attributes:
    value_residual: "dynamic" mixes values with the first layer's, with a weight
      per channel and token; or "none".
    decay_rank: rank of the decay's low-rank map; 0 uses the released rule.
    rate_rank: rank for the in-context learning rate; 0 as above.
    value_rank: rank for the weight of the value residual; 0 as above.
    gate_rank: rank for the output gate; 0 as above.
  """

  op = rwkv7

  value_residual: str = option("dynamic", one_of(VALUE_RESIDUALS))
  decay_rank: int = option(0, not_negative)
  rate_rank: int = option(0, not_negative)
  value_rank: int = option(0, not_negative)
  gate_rank: int = option(0, not_negative)

  def ranks(self, d_model: int) -> dict[str, int]:
    """The rank of every low-rank map."""
    wide = self.key_dim / 64

    def rank(given, factor):
      return given or low_rank.released_rank(d_model, factor)

    return {
      "decay": rank(self.decay_rank, 2.5 * wide),
      "rate": rank(self.rate_rank, 2.5 * wide),
      "value": rank(self.value_rank, 1.7 * wide),
      "gate": rank(self.gate_rank, 5.0),
    }


class RWKV7State(NamedTuple):
  """State of the mixer.

  Attributes:
    last: x of the last token, `[batch, d_model]`.
    last_value: last token of the shifted part of the first layer's value,
      `[batch, width]`; None without a value residual.
    memory: the op's state.
  """

  last: jax.Array
  last_value: jax.Array | None
  memory: rwkv7.State


class RWKV7(base.Mixer):
  """The RWKV-7 time mixing; projections start orthogonal for any `std`."""

  Config = RWKV7Config

  def build(self, config: RWKV7Config, make: parameters.Make) -> None:
    """Makes the parameters."""
    heads, key_dim, d_model = self.heads, self.key_dim, self.d_model
    key_width, value_width = heads * key_dim, heads * self.value_dim
    ranks = config.ranks(d_model)

    def project(width, gain=1.0):
      return linear.Linear(
        d_model,
        width,
        ("embed", "heads"),
        std=gain / math.sqrt(max(d_model, width)),
        init="orthogonal",
        rngs=make.rngs,
      )

    self.shifts = nnx.Dict(
      {
        name: token_shift.TokenShift(d_model, exponent=exponent, first="zero")
        for name, exponent in _SHIFTS.items()
      }
    )
    self.query, self.key = project(key_width), project(key_width, 0.1)
    self.value = project(value_width)
    self.decay = low_rank.LowRank(
      d_model,
      ranks["decay"],
      key_width,
      activation="tanh",
      bias=_decay_bias(heads, key_dim, jnp.zeros(())),
      rngs=make.rngs,
    )
    place = low_rank.ramp(key_width) - 0.5
    self.rate = low_rank.LowRank(
      d_model,
      ranks["rate"],
      key_width,
      bias=-0.19 + 0.3 * _zigzag(heads, key_dim) + 0.4 * place,
      rngs=make.rngs,
    )
    self.value_share = nnx.data(None)
    if config.value_residual != "none":
      self.value_share = low_rank.LowRank(
        d_model,
        ranks["value"],
        value_width,
        bias=low_rank.value_share_bias(value_width),
        rngs=make.rngs,
      )
    self.gate = low_rank.LowRank(
      d_model,
      ranks["gate"],
      value_width,
      activation="sigmoid",
      bias=None,
      rngs=make.rngs,
    )
    of_heads = ("heads",)
    self.removal = linear.constant_param(0.71 - 0.1 * place, of_heads)
    self.replacement = linear.constant_param(
      jnp.full(key_width, 1.02), of_heads
    )
    self.bonus = linear.constant_param(
      jnp.full((heads, key_dim), -0.04), ("heads", "key_dim")
    )
    self.norm_scale = linear.constant_param(jnp.ones(value_width), of_heads)
    self.norm_bias = linear.constant_param(jnp.zeros(value_width), of_heads)
    self.out = make.out(value_width)

  def at_depth(self, depth: jax.Array, layers: int) -> None:
    """Reinitializes for a layer at `depth` = index / layers in [0, 1)."""
    for shift in self.shifts.values():
      shift.at_depth(depth)
    if self.decay.bias is not None:
      # Between 0 for the first layer and 1 for the last.
      place = depth * layers / max(layers - 1, 1)
      bias = _decay_bias(self.heads, self.key_dim, place)
      self.decay.bias[...] = bias.astype(self.decay.bias.dtype)
    scale = jnp.full_like(self.norm_scale[...], (depth + 1 / layers) ** 0.7)
    self.norm_scale[...] = scale

  @contract.default_promotion()
  def value_of(self, x: jax.Array) -> jax.Array:
    """The first layer's value for later layers, at its input `x`.

    The value is that of a shifted token, (x + mu (x_{t-1} - x)) W_v. The result
    has its two parts side by side: that of this token, and that of the previous
    token, which still needs the shift.
    """
    shared = self.shifts["value"].amount[...].astype(x.dtype)
    before = self.value(shared * x)
    return jnp.concatenate([self.value(x) - before, before], axis=-1)

  def fresh_state(self, batch: int, length: int | None = None) -> RWKV7State:
    """The state before the first token, with an empty memory."""
    del length
    memory, last_value = self.init_memory(batch), None
    dtype = memory.memory.dtype
    if self.value_share is not None:
      last_value = jnp.zeros((batch, self.heads * self.value_dim), dtype)
    last = jnp.zeros((batch, self.d_model), dtype)
    return RWKV7State(last, last_value, memory)

  def mix(self, x, state, call, run):
    """Like other mixers, but the gate also depends on the previous token."""
    x_of, state = self._shifted(x, state, call)
    inputs, state = self._projected(x_of, state, call)
    memory, y = run(state.memory, inputs)
    y = self._output(y, inputs, self.gate(x_of["gate"]))
    return y, state._replace(memory=memory)

  def inputs(self, x, state, call):
    """Shifts and projects `[batch, time, d_model]` to the memory's inputs."""
    x_of, state = self._shifted(x, state, call)
    return self._projected(x_of, state, call)

  def _before(self, x, last, state, call):
    """The tokens before those of `x`, zero at a segment's start; the last."""
    return token_shift.token_shift(
      x,
      jnp.ones(x.shape[-1], x.dtype),
      last,
      segment_ids=call.segment_ids,
      segment_id=state.memory.segment_id,
      first="zero",
      rules=self.rules,
    )

  def _shifted(self, x, state, call):
    """x_j for each j, and the new state of the shifts."""
    before, last = self._before(x, state.last, state, call)
    step = before - x
    x_of = {
      name: x + shift.amount[...].astype(x.dtype) * step
      for name, shift in self.shifts.items()
    }
    return x_of, state._replace(last=last)

  def _projected(self, x_of, state, call):
    """The memory's inputs, and the new state of the value residual."""
    query, key = self.query(x_of["query"]), self.key(x_of["key"])
    value, dtype = self.value(x_of["value"]), query.dtype
    first = call.first_value
    if self.value_share is not None and first is not None:
      call_checks.check_width(first, 2 * value.shape[-1])
      here, there = jnp.split(first.astype(dtype), 2, axis=-1)
      there, last_value = self._before(there, state.last_value, state, call)
      state = state._replace(last_value=last_value)
      share = jax.nn.sigmoid(base.wide(self.value_share(x_of["value"])))
      value = value + share.astype(dtype) * (here + there - value)
    log_decay = _STRONGEST * jax.nn.sigmoid(
      base.wide(self.decay(x_of["decay"]))
    )
    rate = jax.nn.sigmoid(base.wide(self.rate(x_of["rate"])))
    removal_key = base.wide(key) * self.removal[...]
    key = base.wide(key) * (1 + (rate - 1) * self.replacement[...])
    query, key, value, removal_key, log_decay, rate = map(
      self.split, (query, key, value, removal_key, log_decay, rate)
    )
    inputs = rwkv7.Inputs(
      query=query,
      key=key.astype(dtype),
      value=value,
      removal_key=activations.l2_norm(removal_key, 1e-12).astype(dtype),
      log_decay=log_decay,
      write_rate=rate,
    )
    return inputs, state

  def _output(self, y: jax.Array, inputs: rwkv7.Inputs, gate: jax.Array):
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(variance + self.key_dim * _NORM_EPS)
    normed = (
      linear.join_heads(wide) * self.norm_scale[...] + self.norm_bias[...]
    )
    match = inputs.query * inputs.key * self.bonus[...]
    bonus = jnp.sum(match, axis=-1, keepdims=True) * inputs.value
    y = (normed + linear.join_heads(bonus)).astype(y.dtype)
    return self.out(y * gate)


def _zigzag(heads: int, dim: int) -> jax.Array:
  """Signed squares of numbers from -1 to 1, repeated for each head."""
  ramp = 2 * low_rank.ramp(dim) - 1
  return jnp.tile(ramp * jnp.abs(ramp), heads)


def _decay_bias(heads: int, dim: int, layer: jax.Array) -> jax.Array:
  """w0 of a `layer` in [0, 1], first to last; early channels forget slowly."""
  place = low_rank.ramp(heads * dim)
  ramp = -6 + 6 * place ** (1 + layer**0.3)
  return ramp + 0.5 + 2.5 * _zigzag(heads, dim)
