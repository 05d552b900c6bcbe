"""The linear attention mixer.

x -> W_q, W_k, W_v -> q, k, v -> linear attention with optional decay
(-> RMS norm of each head) -> W_o (arXiv 2006.16236; docs/linear_attention.md).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import base, linear, norm, options, parameters
from memcomp_kernels import linear_attention
from memcomp_kernels.options import one_of, option

DECAYS = ("none", "head", "token")

_NORM_EPS = 1e-5
# A token's decay is sigmoid(x W) to this power, so that initial decays are slow
# (gated linear attention, arXiv 2312.06635, section 4.4).
_TOKEN_DECAY_POWER = 1 / 16


@options.config_class
class LinearAttentionConfig(options.MixerConfig):
  """Options of linear attention.

  Attributes:
    decay: "none" (the paper), "head" (RetNet: 1 - 2^(-5-h) in head h) or
      "token" (depends on the token).
    output_norm: whether an RMS norm follows in each head.
  """

  op = linear_attention
  left_out = ("forget_gate", "scale", "eps")

  decay: str = option("none", one_of(DECAYS))
  output_norm: bool = False

  def derived(self) -> dict[str, Any]:
    """Whether the memory decays."""
    return {"forget_gate": self.decay != "none"}


class LinearAttention(base.Mixer):
  """Linear attention; the layer's state is the memory."""

  Config = LinearAttentionConfig

  def build(self, config: LinearAttentionConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    keys, values = self.heads * self.key_dim, self.heads * self.value_dim
    self.query, self.key = make.project(keys), make.project(keys)
    self.value = make.project(values)
    self.token_decay = nnx.data(None)
    if config.decay == "token":
      self.token_decay = make.project(self.heads, bias=0.0)
    self.norm = nnx.data(None)
    if config.output_norm:
      self.norm = norm.RMSNorm(self.value_dim, name="value_dim", eps=_NORM_EPS)
    self.out = make.out(values)

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> linear_attention.State:
    """The state before the first token: a memory of zeros."""
    del length
    return self.init_memory(batch)

  def memories(self, state: linear_attention.State) -> tuple[jax.Array, ...]:
    """The array whose root mean square is the metric `memory_norms`."""
    return (state.memory,)

  def fresh_memory(self, batch, memory, call):
    """The layer's state is the memory."""
    return self.fresh_state(batch)

  def mix(self, x, state, call, run):
    """The layer's state is the memory."""
    inputs, _ = self.inputs(x, state, call)
    state, y = run(state, inputs)
    return self.outputs(x, y), state

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    query, key, value = map(
      self.split, (self.query(x), self.key(x), self.value(x))
    )
    log_decay = self._log_decay(x)
    return linear_attention.Inputs(query, key, value, log_decay), state

  def outputs(self, x, y):
    """Applies the optional norm of each head and the output projection."""
    if self.norm is not None:
      y = self.norm(y)
    return self.out(linear.join_heads(y))

  def _log_decay(self, x: jax.Array) -> jax.Array | None:
    """Log decay `[batch, time, heads, 1]`; None without decay."""
    if not self.spec.forget_gate:
      return None
    if self.token_decay is not None:
      logit = base.wide(self.token_decay(x))
      log_decay = _TOKEN_DECAY_POWER * jax.nn.log_sigmoid(logit)
    else:
      wide = jnp.promote_types(x.dtype, jnp.float32)
      head = jnp.arange(self.heads, dtype=wide)
      log_decay = jnp.log1p(-jnp.exp2(-5 - head))
      log_decay = jnp.broadcast_to(log_decay, (*x.shape[:2], self.heads))
    return self.split(log_decay)
