"""Queries, keys and values of attention-like mixers.

Plain projections with rotary positions, optionally with the preprocessing of
GPTAlpha-2 (Key-Value Means, arXiv 2605.09877, appendix B). For a in {q, k, v}:

  a~ = x W_a
  v~ <- (1 - l) v~ + l v~first                   value residual, eq. (8)
  a_t = a~_t + amount_a * (a~_{t-1} - a~_t)      token shift, eq. (9)
  q, k <- rotate(norm(q)), rotate(norm(k))       eq. (10)-(11)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import (
  base,
  call_checks,
  linear,
  low_rank,
  norm,
  options,
  rotary,
  token_shift,
)
from memcomp_kernels import contract
from memcomp_kernels.math import activations
from memcomp_kernels.options import at_least, one_of, option, positive

VALUE_RESIDUALS = ("none", "static", "dynamic", "scalar")
KEY_NORMS = ("none", "layer", "l2")


@options.config_class
class ProjectionConfig(options.MixerConfig):
  """Options that attention-like mixers share.

  Attributes:
    rotary_dim: query and key channels that are rotated; even, at most key_dim;
      0 for none; None for all (Key-Value Means: half, and less than all).
    rotary_base: base of the rotary frequencies.
    rotary_frequencies: "standard" base^(-2j/r), or "inclusive"
      base^(-j/(r/2-1)), whose slowest is exactly 1/base (GPTAlpha-2).
    rotary_scale: s = length / trained length, for sequences longer than in
      training. The base becomes base * s^(r/(r-2)), with "inclusive"
      base * s (NTK).
    rotary_reversed: whether to rotate by minus the angle, for weights that were
      trained in that way.
    projection_bias: whether the query, key and value projections have a bias.
    normalize_key: normalization of query and key: "none", "layer" (learned
      layer norm over a head, shared by all heads) or "l2".
    key_norm_eps: added to the variance by the layer norms of query and key.
    token_shift: whether projections mix with those of the previous token, by
      learned amounts.
    value_residual: weight of the first layer's value: "none", "static" (learned
      per channel), "dynamic" (also depends on the token) or "scalar".
  """

  rotary_dim: int | None = None
  rotary_base: float = option(10_000.0, at_least(1))
  rotary_frequencies: str = option("standard", one_of(rotary.FREQUENCIES))
  rotary_scale: float = option(1.0, at_least(1))
  rotary_reversed: bool = False
  projection_bias: bool = False
  normalize_key: str = option("none", one_of(KEY_NORMS))
  key_norm_eps: float = option(norm.EPS, positive)
  token_shift: bool = False
  value_residual: str = option("none", one_of(VALUE_RESIDUALS))

  def fill(self, d_model: int) -> dict[str, Any]:
    """The sizes that the rule determines; by default the whole key rotates."""
    found = options.MixerConfig.fill(self, d_model)
    return found | rotary.fill(self, found)

  def check(self) -> None:
    """Raises ValueError if the rotated channels do not fit the key."""
    rotary.check(self)


class ProjectionState(NamedTuple):
  """The last token's projections `[batch, width]`; None without a shift."""

  query: jax.Array | None
  key: jax.Array | None
  value: jax.Array | None


class Projection(nnx.Module):
  """Maps x to queries, keys and values.

  Args:
    config: the options.
    d_model: number of features of x.
    std: initial standard deviation of the weights.
    rngs: random streams.
    kv_heads: number of key and value heads; None for as many as query heads.
  """

  def __init__(
    self,
    config: ProjectionConfig,
    d_model: int,
    *,
    std: float,
    rngs: nnx.Rngs,
    kv_heads: int | None = None,
  ):
    kv_heads = kv_heads or config.heads
    query_width = config.heads * config.key_dim
    key_width = kv_heads * config.key_dim
    value_width = kv_heads * config.value_dim
    into = ("embed", "heads")

    def project(width):
      bias = 0.0 if config.projection_bias else None
      return linear.Linear(d_model, width, into, std=std, bias=bias, rngs=rngs)

    self.query = project(query_width)
    self.key = project(key_width)
    self.value = project(value_width)

    def shift(width, exponent):
      if not config.token_shift:
        return nnx.data(None)
      return token_shift.TokenShift(
        width, exponent=exponent, first="itself", name="heads"
      )

    self.query_shift = shift(query_width, 0.2)
    self.key_shift = shift(key_width, 0.7)
    self.value_shift = shift(value_width, 0.7)

    def head_norm():
      if config.normalize_key != "layer":
        return nnx.data(None)
      return norm.LayerNorm(
        config.key_dim, name="key_dim", eps=config.key_norm_eps
      )

    self.query_norm, self.key_norm = head_norm(), head_norm()

    self.value_residual = config.value_residual
    self.residual_logit = nnx.data(None)
    self.residual_down, self.residual_up = nnx.data(None), nnx.data(None)
    if config.value_residual == "scalar":
      self.residual_logit = linear.constant_param(jnp.full(1, 0.5), (None,))
    elif config.value_residual != "none":
      self.residual_logit = linear.constant_param(
        low_rank.value_share_bias(value_width), ("heads",)
      )
    if config.value_residual == "dynamic":
      rank = low_rank.released_rank(d_model, 1.3)
      self.residual_down, self.residual_up = low_rank.pair(
        d_model, rank, value_width, rngs=rngs
      )

    self.heads, self.kv_heads = config.heads, kv_heads
    self.normalize_key = config.normalize_key
    self.rotary = rotary.Rotary(
      dim=config.rotary_dim or 0,
      base=config.rotary_base,
      frequencies=config.rotary_frequencies,
      scale=config.rotary_scale,
      reversed=config.rotary_reversed,
    )

  def at_depth(self, depth: jax.Array) -> None:
    """Reinitializes for a layer at `depth` in [0, 1)."""
    for shift in (self.query_shift, self.key_shift, self.value_shift):
      if shift is not None:
        shift.at_depth(depth)

  def init_state(self, batch: int) -> ProjectionState:
    """The state before the first token."""

    def last(shift):
      return None if shift is None else shift.init_state(batch)

    return ProjectionState(
      last(self.query_shift), last(self.key_shift), last(self.value_shift)
    )

  def __call__(
    self,
    x: jax.Array,
    state: ProjectionState,
    call: base.Call,
    *,
    segment_id: jax.Array,
    position: jax.Array,
    rules: sharding.Rules,
  ) -> tuple[jax.Array, jax.Array, jax.Array, ProjectionState]:
    """Returns query, key, value `[batch, time, heads, dim]`, and the state.

    Key and value have `kv_heads` heads.

    Args:
      x: `[batch, time, d_model]`.
      state: state before the first token.
      call: `segment_ids`, and `first_value` for a value residual. Without
        `first_value`, this layer's values are the first ones.
      segment_id: `[batch]`, segment of the memory's state.
      position: `[batch]`, tokens of that segment so far.
      rules: sharding of batch, time and heads.
    """
    segment_ids = call.segment_ids
    query, key, value = self.query(x), self.key(x), self.value(x)
    if self.residual_logit is not None and call.first_value is not None:
      call_checks.check_width(call.first_value, value.shape[-1])
      share = self._share(x, self.residual_logit[...]).astype(value.dtype)
      first = call.first_value.astype(value.dtype)
      value = value + share * (first - value)

    def shifted(shift, y, last):
      if shift is None:
        return y, None
      return shift(
        y, last, segment_ids=segment_ids, segment_id=segment_id, rules=rules
      )

    query, query_last = shifted(self.query_shift, query, state.query)
    key, key_last = shifted(self.key_shift, key, state.key)
    value, value_last = shifted(self.value_shift, value, state.value)
    query = linear.split_heads(query, self.heads, rules)
    rules.check_size("heads", self.kv_heads, "kv_heads")
    key, value = (
      linear.split_heads(y, self.kv_heads, rules) for y in (key, value)
    )
    if self.query_norm is not None and self.key_norm is not None:
      query, key = self.query_norm(query), self.key_norm(key)
    elif self.normalize_key == "l2":
      query, key = activations.unit(query), activations.unit(key)
    positions = contract.token_positions(
      segment_ids, segment_id, position, x.shape[1]
    )
    query, key = self.rotary(query, positions), self.rotary(key, positions)
    return (
      query,
      key,
      value,
      ProjectionState(query_last, key_last, value_last),
    )

  def _share(self, x, logit):
    if self.value_residual == "scalar":
      return logit
    if self.residual_down is not None and self.residual_up is not None:
      logit = logit + self.residual_up(self.residual_down(x))
    return jax.nn.sigmoid(logit)


class ProjectedState(NamedTuple):
  """State of the projections and of the memory."""

  projection: ProjectionState
  memory: Any


class ProjectedMixer(base.Mixer):
  """A mixer with queries, keys and values from `Projection`."""

  projection: Projection
  out: linear.Linear

  def at_depth(self, depth: jax.Array, layers: int) -> None:
    """Reinitializes for a layer at `depth` in [0, 1)."""
    del layers
    self.projection.at_depth(depth)

  @contract.default_promotion()
  def value_of(self, x: jax.Array) -> jax.Array:
    """The value projection of `x` for the value residuals of later layers."""
    return self.projection.value(x)

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> ProjectedState:
    """The state before the first token, with an empty memory."""
    del length
    return ProjectedState(
      self.projection.init_state(batch), self.init_memory(batch)
    )

  def project(
    self, x: jax.Array, state: ProjectedState, call: base.Call
  ) -> tuple[jax.Array, jax.Array, jax.Array, ProjectedState]:
    """Returns query, key, value `[batch, time, heads, dim]`, and the state."""
    query, key, value, projected = self.projection(
      x,
      state.projection,
      call,
      segment_id=state.memory.segment_id,
      position=state.memory.position,
      rules=self.rules,
    )
    return query, key, value, state._replace(projection=projected)

  def outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    """Projects the reads of all heads to d_model features."""
    return self.out(linear.join_heads(y))
