"""The linear attention mixer.

x -> W_q, W_k, W_v -> q, k, v -> linear attention, with a decay if asked for
(-> RMS norm of each head) -> W_o (arXiv 2006.16236; docs/linear_attention.md).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, norm
from memcomp_kernels.linear_attention import api as linear_attention

DECAYS = ("none", "head", "token")

_NORM_EPS = 1e-5
# A token's decay is sigmoid(x W) to this power (gated linear attention,
# arXiv 2312.06635, section 4.4): memories start out long.
_TOKEN_DECAY_POWER = 1 / 16


@dataclasses.dataclass(kw_only=True, slots=True)
class LinearAttentionConfig(mixer.MixerConfig):
  """A linear attention mixer.

  Attributes:
    heads: memories side by side.
    key_dim: features of a head's query and key.
    value_dim: features of a head's value.
    feature_map: see `memcomp_kernels.linear_attention.types.Spec`, as the next.
    normalize: reads divided by the weights' sum.
    decay: "none" (the paper), "head" (1 - 2^(-5-h) at head h: RetNet) or
      "token" (depends on the token).
    output_norm: an RMS norm of each head's read.
  """

  heads: int = 12
  key_dim: int = 64
  value_dim: int = 64
  feature_map: str = "elu"
  normalize: bool = True
  decay: str = "none"
  output_norm: bool = False

  def spec(self) -> linear_attention.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    return linear_attention.Spec(
      feature_map=self.feature_map,
      normalize=self.normalize,
      forget_gate=self.decay != "none",
    )

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.spec()
    mixer.require_positive(self, "heads", "key_dim", "value_dim")
    if self.decay not in DECAYS:
      raise ValueError(
        f"decay={self.decay!r} is not one of: {', '.join(DECAYS)}"
      )

  def state_floats(self, length: int) -> int:
    """Floats of the memory for any length, for one layer."""
    del length
    return self.heads * self.key_dim * (self.value_dim + self.normalize)

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, for one layer.

    Multiply-adds count two: the write and the read.
    """
    del length
    return 4 * self.heads * self.key_dim * (self.value_dim + self.normalize)


class LinearAttention(nnx.Module):
  """The linear attention mixer; its state is the memory's.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: LinearAttentionConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads = config.heads

    def project(width, bias=None):
      return linear.Linear(
        d_model, width, ("embed", "heads"), std=std, bias=bias, rngs=rngs
      )

    self.query = project(heads * config.key_dim)
    self.key = project(heads * config.key_dim)
    self.value = project(heads * config.value_dim)
    self.token_decay = nnx.data(None)
    if config.decay == "token":
      self.token_decay = project(heads, bias=0.0)
    self.norm = nnx.data(None)
    if config.output_norm:
      self.norm = norm.RMSNorm(
        config.value_dim, name="value_dim", eps=_NORM_EPS
      )
    self.out = linear.Linear(
      heads * config.value_dim,
      d_model,
      ("heads", "embed"),
      std=out_std,
      rngs=rngs,
    )
    self.spec = config.spec()
    self.heads = heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim

  def init_state(
    self, batch: int, length: int | None = None
  ) -> linear_attention.State:
    """The state before the first token: a memory of zeros."""
    del length
    return linear_attention.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
    )

  def memories(self, state: linear_attention.State) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return (state.memory,)

  def _log_decay(self, x: jax.Array) -> jax.Array | None:
    """`[batch, time, heads, 1]`, or None without a decay."""
    if not self.spec.forget_gate:
      return None
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if self.token_decay is not None:
      logit = self.token_decay(x).astype(wide)
      log_decay = _TOKEN_DECAY_POWER * jax.nn.log_sigmoid(logit)
    else:
      head = jnp.arange(self.heads, dtype=wide)
      log_decay = jnp.log1p(-jnp.exp2(-5 - head))
      log_decay = jnp.broadcast_to(log_decay, (*x.shape[:2], self.heads))
    return linear.split_heads(log_decay, self.heads)

  def _inputs(self, x: jax.Array) -> linear_attention.Inputs:
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    query, key, value = (
      linear.split_heads(y, self.heads)
      for y in (self.query(x), self.key(x), self.value(x))
    )
    return linear_attention.Inputs(query, key, value, self._log_decay(x))

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    if self.norm is not None:
      y = self.norm(y)
    return self.out(y.reshape(*x.shape[:-1], -1))

  def __call__(
    self,
    x: jax.Array,
    state: linear_attention.State,
    context: mixer.Context,
  ) -> tuple[jax.Array, linear_attention.State]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    chunk = sharding.on_mesh(linear_attention.chunk)
    state, y = chunk(
      state,
      self._inputs(x),
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=None if segment_ids is None else self.init_state(x.shape[0]),
    )
    return self._output(x, y), state

  def step(
    self,
    x: jax.Array,
    state: linear_attention.State,
    context: mixer.Context,
  ) -> tuple[jax.Array, linear_attention.State]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    inputs = jax.tree.map(lambda a: a[:, 0], self._inputs(x[:, None]))
    state, y = linear_attention.step(state, inputs, spec=self.spec)
    return self._output(x, y), state
