"""The mixer around the two-pass delta rule.

x -> W_x, W_q -> source, query (of length 1);  W_k, W_v -> k, v
alpha = sigmoid, theta = softplus, both linear in (k, v) of a head
-> memory -> RMS norm -> W_o                     (docs/two_pass_delta.md)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import base, linear, norm, options, parameters, positions
from memcomp_kernels import two_pass_delta
from memcomp_kernels.math import activations
from memcomp_kernels.options import (
  at_least,
  inside,
  not_negative,
  one_of,
  option,
  positive,
)

READ_PATHS = ("query", "key")


@options.config_class
class TwoPassDeltaConfig(options.MixerConfig):
  """Options of the two-pass delta rule.

  Attributes:
    read_path: what is read: a separate "query", or the "key".
    normalize: whether sources and queries have length 1.
    decay_init: initial 1 - alpha, in (0, 1).
    write_rate_init: initial theta, > 0.
    rate_bound: b > 0 replaces theta by theta b / (b + theta), which is below b;
      0 for no bound. With sources of length 1, steps of the first pass
      overshoot from 2 on.
    code_rate: if True, the second pass uses theta / key_dim, because key_dim is
      the square of a code's length. If False, it uses theta as published, which
      overshoots from 2 / key_dim on.
    write_every: only every n-th token of a segment is written; n >= 1.
  """

  op = two_pass_delta

  read_path: str = option("query", one_of(READ_PATHS))
  normalize: bool = True
  decay_init: float = option(0.982, inside(0, 1))
  write_rate_init: float = option(0.5, positive)
  rate_bound: float = option(1.0, not_negative)
  code_rate: bool = True
  write_every: int = option(1, at_least(1))


class TwoPassDeltaState(NamedTuple):
  """State of the mixer.

  Attributes:
    position: int32 `[batch]`, tokens of the segment so far; None if every token
      is written.
    memory: the op's state.
  """

  position: jax.Array | None
  memory: two_pass_delta.State


class TwoPassDelta(base.Mixer):
  """The two-pass delta rule: projections and gates around the memory."""

  Config = TwoPassDeltaConfig
  memory_fields = ("key_memory", "value_memory")

  def build(self, config: TwoPassDeltaConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    heads = self.heads
    keys, values = heads * self.key_dim, heads * self.value_dim
    self.source = make.project(keys)
    self.query = nnx.data(None)
    if config.read_path == "query":
      self.query = make.project(keys)
    self.key = make.project(keys)
    self.value = make.project(values)
    self.gates = linear.normal_param(
      make.rngs,
      (heads, self.key_dim + self.value_dim, 2),
      ("heads", None, None),
      std=make.std,
    )
    bias = (
      linear.logit(config.decay_init),
      linear.inverse_softplus(config.write_rate_init),
    )
    self.gate_bias = linear.constant_param(
      jnp.tile(jnp.array(bias), (heads, 1)), ("heads", None)
    )
    self.post_norm = norm.RMSNorm(values, name="heads")
    self.out = make.out(values)
    self.normalize = config.normalize
    self.rate_bound = config.rate_bound
    self.code_rate = config.code_rate
    self.write_every = config.write_every

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> TwoPassDeltaState:
    """The state before the first token, with empty memories."""
    del length
    position = None
    if self.write_every > 1:
      position = jnp.zeros(batch, jnp.int32)
    return TwoPassDeltaState(position, self.init_memory(batch))

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    source, key, value = (
      self.split(project(x)) for project in (self.source, self.key, self.value)
    )
    query = key if self.query is None else self.split(self.query(x))
    if self.normalize:
      source, query = activations.unit(source), activations.unit(query)
    both = base.wide(jnp.concatenate([key, value], axis=-1))
    logits = jnp.einsum("bthi,hig->bthg", both, self.gates[...])
    logits = logits + self.gate_bias[...]
    rate = jax.nn.softplus(logits[..., 1:])
    if self.rate_bound:
      rate = rate * self.rate_bound / (self.rate_bound + rate)
    if self.code_rate:
      rate = jnp.concatenate([rate, rate / self.key_dim], axis=-1)
    active = None
    if state.position is not None:
      token_positions, position = positions.advance(
        call.segment_ids, state.memory.segment_id, state.position, x.shape[1]
      )
      active = (token_positions % self.write_every == 0).astype(rate.dtype)
      active = jnp.broadcast_to(active[..., None, None], (*rate.shape[:3], 1))
      state = state._replace(position=position)
    inputs = two_pass_delta.Inputs(
      query=query,
      source=source,
      key=key,
      value=value,
      log_decay=jax.nn.log_sigmoid(logits[..., :1]),
      write_rate=rate,
      active=active,
    )
    return inputs, state

  def outputs(self, x, y):
    """Applies norm and output projection."""
    return self.out(self.post_norm(linear.join_heads(y)))
