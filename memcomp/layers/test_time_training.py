"""The test-time training mixer: projections and gates around the memory.

x -> W_q, W_k, W_v -> q, k, v, with rotary positions inside a chunk; inner
rate gate -> test-time training -> layer norm -> * GELU(x W_g) -> W_o
(arXiv 2407.04620, section 2.7; docs/test_time_training.md has the choices).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import base, linear, norm, options, rotary
from memcomp_kernels import contract
from memcomp_kernels.test_time_training import api as test_time_training

option = options.option
_SPEC = test_time_training.Spec()
_CONVOLVED = ("query", "key")


@dataclasses.dataclass(kw_only=True, slots=True)
class TestTimeTrainingConfig(options.MixerConfig):
  """Options of test-time training; first those of the kernel's `Spec`.

  Attributes:
    model: "linear" or "mlp", see `memcomp_kernels.test_time_training.types`,
      as all down to `norm_eps`.
    expansion: hidden features of "mlp" per feature of a key.
    gradient_at: "chunk_start" or "token".
    chunk_size: tokens that share a chunk-start gradient.
    forget_gate: whether the inner weights decay.
    norm_eps: inside the inner layer norm.
    key_dim: features of a head's query, key and value.
    value_dim: the same number.
    decay_init: decay factor at the start, in (0, 1).
    write_rate_init: inner learning rate at the start, in
      (0, write_rate_scale).
    write_rate_scale: the largest inner learning rate. Both are divided by
      key_dim. The paper has 1 for "linear", 0.1 for "mlp".
    average_step: at the j-th token of a chunk, weights go 1 / j of the way of
      the gradients so far, plus a learned number for each j (as released); if
      False all of it (as printed). Only with gradients at chunk starts.
    rotary_dim: channels of q and k turned by the position in the chunk; even,
      0 for none, None for all.
    weight_std: of the inner model's initial weights, which are learned, at
      the start.
    convolution_width: taps of short convolutions on q and k, which then share
      a projection (the paper's Mamba backbone); 0 for none.
  """

  # Test runners collect classes by this name's beginning.
  __test__ = False

  Spec = test_time_training.Spec

  model: str = _SPEC.model
  expansion: int = _SPEC.expansion
  gradient_at: str = _SPEC.gradient_at
  chunk_size: int = _SPEC.chunk_size
  forget_gate: bool = _SPEC.forget_gate
  norm_eps: float = _SPEC.norm_eps
  decay_init: float = option(0.982, options.inside(0, 1))
  write_rate_init: float = 0.5
  write_rate_scale: float = 1.0
  average_step: bool = True
  rotary_dim: int | None = None
  weight_std: float = option(0.02, options.positive)
  convolution_width: int = option(0, options.taps)

  def fill(self, d_model: int) -> dict[str, Any]:
    """The sizes that are left to the rule; all of the key is rotated."""
    found = options.MixerConfig.fill(self, d_model)
    if self.key_dim and not self.value_dim:
      found["value_dim"] = self.key_dim
    return found | rotary.fill(self, found)

  def check(self) -> None:
    """Raises ValueError where fields do not agree."""
    if self.key_dim and self.value_dim not in (0, self.key_dim):
      raise ValueError(
        f"value_dim={self.value_dim} must be key_dim={self.key_dim}: the inner"
        " model answers x + LN(model(x))"
      )
    options.check_write_rate(self)
    rotary.check(self)

  def state_floats(self, length: int) -> int:
    """Floats of the inner weights for any length, for one layer."""
    del length
    widths = self.spec().widths(self.key_dim)
    return self.heads * sum((before + 1) * after for before, after in widths)

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, for one layer.

    Multiply-adds count two: answering key and query, gradients, the write.
    """
    del length
    spec = self.spec()
    widths = spec.widths(self.key_dim)
    sizes = [before * after for before, after in widths]
    # A gradient passes through all layers but the first.
    per_head = 6 * sum(sizes) + 2 * sum(sizes[1:])
    if spec.stale:
      # Within a chunk the reads go through a score matrix a layer.
      per_head += 2 * self.chunk_size * sum(a + b for a, b in widths)
    return self.heads * per_head


class TestTimeTrainingState(NamedTuple):
  """State of the mixer: convolution taps (or None) and the memory."""

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  memory: test_time_training.State


class TestTimeTraining(base.Mixer):
  """Test-time training: projections and gates around the memory."""

  __test__ = False

  Config = TestTimeTrainingConfig
  op = base.Op(
    test_time_training.init_state,
    test_time_training.chunk,
    test_time_training.step,
  )

  def build(self, config: TestTimeTrainingConfig, make: base.Make) -> None:
    """Makes the parameters."""
    heads, dim, taps = self.heads, self.key_dim, config.convolution_width
    width = heads * dim
    # With convolutions both come from one projection.
    self.query = nnx.data(None) if taps else make.project(width)
    self.key = make.project(width)
    self.value = make.project(width)
    self.gate = make.project(width)
    rate = config.write_rate_init / config.write_rate_scale
    self.write_rate = make.project(heads, linear.logit(rate))
    self.log_decay = nnx.data(None)
    if config.forget_gate:
      self.log_decay = make.project(heads, linear.logit(config.decay_init))
    self.step_offset = nnx.data(None)
    if config.average_step and self.spec.stale:
      self.step_offset = linear.constant_param(
        jnp.zeros(config.chunk_size), (None,)
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
    """The state before the first token; holds the learned inner weights."""
    del length
    layers = tuple(
      test_time_training.Layer(weight[...], bias[...])
      for weight, bias in zip(self.weights, self.biases, strict=True)
    )
    memory = self.init_memory(
      batch,
      layers=layers,
      norm_scale=self.norm_scale[...],
      norm_bias=self.norm_bias[...],
    )
    return TestTimeTrainingState(
      **self.fresh_taps(batch, _CONVOLVED), memory=memory
    )

  def memories(self, state: TestTimeTrainingState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return tuple(layer.weight for layer in state.memory.layers)

  def load(self, memory):
    """Puts the learned inner norm in, which rides along in the state."""
    shape = memory.norm_scale.shape
    return memory._replace(
      norm_scale=jnp.broadcast_to(self.norm_scale[...], shape),
      norm_bias=jnp.broadcast_to(self.norm_bias[...], shape),
    )

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    memory = state.memory
    key = self.key(x)
    query = key if self.query is None else self.query(x)
    (query, key), state = self.convolved(
      state, call, query, key, names=_CONVOLVED
    )
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
      place = contract.token_positions(
        call.segment_ids, memory.segment_id, memory.position, x.shape[1]
      )
      place = place % self.spec.chunk_size
      query, key = self.rotary(query, place), self.rotary(key, place)
      if self.step_offset is not None:
        # Weighed for all places of a chunk, then looked up.
        share = 1 / jnp.arange(1, self.spec.chunk_size + 1, dtype=rate.dtype)
        share = jax.nn.relu(share + self.step_offset[...])
        scale = share[place][..., None, None]
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
    """Layer norm, gate, output projection."""
    y = y.reshape(*y.shape[:-2], -1)
    return self.out(self.post_norm(y) * jax.nn.gelu(self.gate(x)))
