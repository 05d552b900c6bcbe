"""Query, key and value of attention-like mixers.

Plain projections with rotary positions, or with any of the preparations of
GPTAlpha-2 (Key-Value Means, arXiv 2605.09877, appendix B), for
a in {q, k, v}:

  a~ = x W_a
  v~ <- (1 - l) v~ + l v~first                   value residual, eq. (8)
  a_t = a~_t + amount_a * (a~_{t-1} - a~_t)      token shift, eq. (9)
  q, k <- rotate(norm(q)), rotate(norm(k))       eq. (10)-(11)
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import linear, mixer, norm, rotary, token_shift
from memcomp_kernels import contract
from memcomp_kernels.primitives import activations

VALUE_RESIDUALS = ("none", "static", "dynamic", "scalar")
KEY_NORMS = ("none", "layer", "l2")


@dataclasses.dataclass(kw_only=True, slots=True)
class ProjectionConfig(mixer.MixerConfig):
  """The fields that attention-like mixers share.

  Attributes:
    heads: side by side.
    key_dim: features of a head's query and key.
    value_dim: features of a head's value.
    rotary_dim: channels of query and key that are rotated by position, even,
      at most key_dim; 0 for none.
    rotary_base: of the rotary frequencies.
    rotary_frequencies: "standard" base^(-2j/r), or "inclusive"
      base^(-j/(r/2-1)), whose slowest is 1/base exactly (GPTAlpha-2).
    rotary_scale: s = length / trained length: the base is stretched to
      base * s^(r/(r-2)) (NTK) for sequences longer than trained on.
    projection_bias: query, key and value are projected with a bias.
    normalize_key: of query and key: "none", "layer" (a learned layer norm over
      a head, shared by heads) or "l2".
    token_shift: a learned share of the previous token's projection.
    value_residual: share of the first layer's value: "none", "static" (a
      learned number a channel), "dynamic" (depends on the token as well) or
      "scalar".
  """

  heads: int = 12
  key_dim: int = 64
  value_dim: int = 64
  rotary_dim: int = 64
  rotary_base: float = 10_000.0
  rotary_frequencies: str = "standard"
  rotary_scale: float = 1.0
  projection_bias: bool = False
  normalize_key: str = "none"
  token_shift: bool = False
  value_residual: str = "none"

  def validate_projection(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    mixer.require_positive(self, "heads", "key_dim", "value_dim")
    if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.key_dim:
      raise ValueError(
        f"rotary_dim={self.rotary_dim} must be even and in [0, key_dim="
        f"{self.key_dim}]"
      )
    for name in ("rotary_base", "rotary_scale"):
      if not getattr(self, name) >= 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    for name, choices in (
      ("rotary_frequencies", rotary.FREQUENCIES),
      ("normalize_key", KEY_NORMS),
      ("value_residual", VALUE_RESIDUALS),
    ):
      if getattr(self, name) not in choices:
        raise ValueError(
          f"{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}"
        )


class ProjectionState(NamedTuple):
  """The last token's projections `[batch, width]`; None without a shift."""

  query: jax.Array | None
  key: jax.Array | None
  value: jax.Array | None


class Projection(nnx.Module):
  """Maps x to queries, keys and values.

  Args:
    config: its configuration.
    d_model: features of x.
    std: of the weights at the start.
    rngs: random streams.
    kv_heads: heads of keys and values; None for as many as of queries.
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
      return norm.LayerNorm(config.key_dim, name="key_dim")

    self.query_norm, self.key_norm = head_norm(), head_norm()

    self.value_residual = config.value_residual
    self.residual_logit = nnx.data(None)
    self.residual_down, self.residual_up = nnx.data(None), nnx.data(None)
    if config.value_residual == "scalar":
      self.residual_logit = linear.constant_param(jnp.full(1, 0.5), (None,))
    elif config.value_residual != "none":
      place = jnp.arange(value_width) / max(value_width - 1, 1)
      self.residual_logit = linear.constant_param(
        0.73 - 0.4 * (place - 0.5), ("heads",)
      )
    if config.value_residual == "dynamic":
      rank = max(32, 32 * round(1.3 * math.sqrt(d_model) / 32))
      self.residual_down = linear.Linear(
        d_model, rank, ("embed", None), std=0.0, rngs=rngs
      )
      self.residual_up = linear.Linear(
        rank,
        value_width,
        (None, "heads"),
        std=0.1 / math.sqrt(max(rank, value_width)),
        init="orthogonal",
        rngs=rngs,
      )

    self.heads, self.kv_heads = config.heads, kv_heads
    self.normalize_key = config.normalize_key
    self.rotary = rotary.Rotary(
      dim=config.rotary_dim,
      base=config.rotary_base,
      frequencies=config.rotary_frequencies,
      scale=config.rotary_scale,
    )

  def at_depth(self, depth: jax.Array) -> None:
    """Starts as a layer at `depth` in [0, 1)."""
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
    context: mixer.Context,
    *,
    segment_id: jax.Array,
    position: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array, ProjectionState]:
    """Returns query, key, value `[batch, time, heads, dim]`, and the state.

    Key and value have `kv_heads` heads.

    Args:
      x: `[batch, time, d_model]`.
      state: before the first token.
      context: `segment_ids`, and `first_value` with a value residual.
      segment_id: `[batch]`, of the memory's state before the first token.
      position: `[batch]`, tokens of that segment so far.
    """
    segment_ids = context.segment_ids
    query, key, value = self.query(x), self.key(x), self.value(x)
    if self.residual_logit is not None:
      if context.first_value is None:
        raise ValueError("a value residual needs context.first_value")
      share = self._share(x, self.residual_logit[...]).astype(value.dtype)
      first = context.first_value.astype(value.dtype)
      value = value + share * (first - value)

    def shifted(shift, y, last):
      if shift is None:
        return y, None
      return shift(y, last, segment_ids=segment_ids, segment_id=segment_id)

    query, query_last = shifted(self.query_shift, query, state.query)
    key, key_last = shifted(self.key_shift, key, state.key)
    value, value_last = shifted(self.value_shift, value, state.value)
    query = linear.split_heads(query, self.heads)
    key, value = (linear.split_heads(y, self.kv_heads) for y in (key, value))
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
