"""The test-time training mixer: projections and gates around the memory.

x -> W_qk -> two short convolutions -> q, k, with rotary positions inside a
chunk; W_v -> v; inner rate gate -> test-time training -> layer norm
-> * GELU(x W_g) -> W_o
(arXiv 2407.04620, section 2.7; docs/test_time_training.md explains our
choices).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import (
  base,
  convolved,
  linear,
  norm,
  options,
  parameters,
  rotary,
)
from memcomp_kernels import contract, test_time_training
from memcomp_kernels.options import inside, option, positive
from memcomp_kernels.test_time_training import reference


@options.config_class
class TestTimeTrainingConfig(options.MixerConfig):
  """Options of test-time training.

  Attributes:
    key_dim: features of a head's query, key and value.
    value_dim: must equal key_dim.
    decay_init: initial decay factor, in (0, 1).
    write_rate_init: initial inner learning rate, in (0, write_rate_scale).
    write_rate_scale: maximum inner learning rate; both are divided by key_dim.
      The paper has 1 for "linear" and 0.1 for "mlp".
    average_step: whether token j of a chunk scales the sum of gradients so far
      by 1 / j plus a learned number (as released). If False, by 1 (as printed).
      Only for chunk-start gradients.
    rotary_dim: q and k channels rotated by the position in the chunk; even, 0
      for none, None for all. Not read with gradients per token.
    weight_std: initial standard deviation of the learned initial inner weights.
    convolution_width: taps of short convolutions on q and k, which then share a
      projection (the paper's Mamba backbone); 0 for none, as in its Transformer
      backbone.
  """

  # pytest would collect classes whose names begin with "Test".
  __test__ = False

  op = test_time_training

  decay_init: float = option(0.982, inside(0, 1))
  write_rate_init: float = 0.5
  write_rate_scale: float = 1.0
  average_step: bool = True
  rotary_dim: int | None = None
  weight_std: float = option(0.02, positive)
  convolution_width: int = option(4, options.taps)

  def fill(self, d_model: int) -> dict[str, Any]:
    """The sizes that the rule determines; by default the whole key rotates."""
    if self.key_dim and not self.value_dim:
      same = dataclasses.replace(self, value_dim=self.key_dim)
      return {"value_dim": self.key_dim} | same.fill(d_model)
    found = options.MixerConfig.fill(self, d_model)
    return found | rotary.fill(self, found)

  def check(self) -> None:
    """Raises ValueError if fields contradict each other."""
    if self.key_dim and self.value_dim not in (0, self.key_dim):
      raise ValueError(
        f"value_dim={self.value_dim} must be key_dim={self.key_dim}: the inner"
        " model answers x + LN(model(x))"
      )
    options.check_write_rate(self)
    rotary.check(self)


class TestTimeTrainingState(NamedTuple):
  """State of the mixer: convolution taps (or None) and the memory."""

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  memory: test_time_training.State


class TestTimeTraining(convolved.ConvolvedMixer):
  """Test-time training: projections and gates around the memory."""

  __test__ = False

  Config = TestTimeTrainingConfig
  convolved_names = ("query", "key")

  def build(
    self, config: TestTimeTrainingConfig, make: parameters.Make
  ) -> None:
    """Makes the parameters."""
    heads, dim, taps = self.heads, self.key_dim, config.convolution_width
    width = heads * dim
    # With convolutions, query and key share one projection.
    self.query = nnx.data(None) if taps else make.project(width)
    self.key = make.project(width)
    self.value = make.project(width)
    self.gate = make.project(width)
    rate = config.write_rate_init / config.write_rate_scale
    self.write_rate = make.project(heads, linear.logit(rate))
    self.log_decay = nnx.data(None)
    if self.spec.forget_gate:
      self.log_decay = make.project(heads, linear.logit(config.decay_init))
    self.step_offset = nnx.data(None)
    if config.average_step and self.spec.chunked:
      self.step_offset = linear.constant_param(
        jnp.zeros(self.spec.chunk_size), (None,)
      )
    self.out = make.out(width)
    self.post_norm = norm.LayerNorm(width, name="heads")
    self.query_convolution = make.convolution(width, taps)
    self.key_convolution = make.convolution(width, taps)

    def weight(before, after):
      return linear.normal_param(
        make.rngs,
        (heads, before, after),
        ("heads", None, None),
        std=config.weight_std,
        weight_decay=False,
      )

    def bias(after):
      return linear.constant_param(jnp.zeros((heads, after)), ("heads", None))

    widths = self.spec.widths(dim)
    self.weights = nnx.List([weight(*pair) for pair in widths])
    self.biases = nnx.List([bias(after) for _, after in widths])
    of_head = ("heads", "value_dim")
    self.norm_scale = linear.constant_param(jnp.ones((heads, dim)), of_head)
    self.norm_bias = linear.constant_param(jnp.zeros((heads, dim)), of_head)
    self.rotary = rotary.Rotary(dim=config.rotary_dim or 0)
    self.write_rate_scale = config.write_rate_scale / dim

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> TestTimeTrainingState:
    """The state before the first token, with the learned inner weights."""
    del length
    layers = tuple(
      reference.Layer(weight[...], bias[...])
      for weight, bias in zip(self.weights, self.biases, strict=True)
    )
    memory = self.init_memory(
      batch,
      layers=layers,
      norm_scale=self.norm_scale[...],
      norm_bias=self.norm_bias[...],
    )
    return TestTimeTrainingState(**self.fresh_taps(batch), memory=memory)

  def memories(self, state: TestTimeTrainingState) -> tuple[jax.Array, ...]:
    """The arrays whose root mean square is the metric `memory_norms`."""
    return tuple(layer.weight for layer in state.memory.layers)

  def load(self, memory):
    """Copies the learned inner norm into the state, which contains it."""
    return memory._replace(
      norm_scale=base.copied(self.norm_scale, memory.norm_scale),
      norm_bias=base.copied(self.norm_bias, memory.norm_bias),
    )

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    memory = state.memory
    key = self.key(x)
    query = key if self.query is None else self.query(x)
    (query, key), state = self.convolved(state, call, query, key)
    rate = jax.nn.sigmoid(base.wide(self.write_rate(x)))
    if self.log_decay is None:
      log_decay = jnp.zeros_like(rate)
    else:
      log_decay = jax.nn.log_sigmoid(base.wide(self.log_decay(x)))
    query, key, value, log_decay, rate = map(
      self.split, (query, key, self.value(x), log_decay, rate)
    )
    scale = None
    if memory.position is not None:  # gradients at chunk starts
      chunk_position = contract.token_positions(
        call.segment_ids, memory.segment_id, memory.position, x.shape[1]
      )
      chunk_position = chunk_position % self.spec.chunk_size
      query, key = (self.rotary(a, chunk_position) for a in (query, key))
      if self.step_offset is not None:
        # Weight all positions of a chunk, then look up each token's.
        share = 1 / jnp.arange(1, self.spec.chunk_size + 1, dtype=rate.dtype)
        share = jax.nn.relu(share + self.step_offset[...])
        scale = share[chunk_position][..., None, None]
        scale = jnp.broadcast_to(scale, rate.shape)
    inputs = test_time_training.Inputs(
      query=query,
      key=key,
      value=value,
      log_decay=log_decay,
      write_rate=self.write_rate_scale * rate,
      step_scale=scale,
    )
    return inputs, state

  def outputs(self, x, y):
    """Applies layer norm, gate and output projection."""
    y = linear.join_heads(y)
    return self.out(self.post_norm(y) * jax.nn.gelu(self.gate(x)))
