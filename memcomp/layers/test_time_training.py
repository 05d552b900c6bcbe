"""The test-time training mixer: projections and gates around the memory.

x -> W_q, W_k, W_v -> q, k, v, with rotary positions inside a chunk; inner
rate gate -> test-time training -> layer norm -> * GELU(x W_g) -> W_o
(arXiv 2407.04620, section 2.7; docs/test_time_training.md has the choices).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, norm, rotary, short_convolution
from memcomp_kernels import contract
from memcomp_kernels.test_time_training import api as test_time_training


@dataclasses.dataclass(kw_only=True, slots=True)
class TestTimeTrainingConfig(mixer.MixerConfig):
  """A test-time training mixer; first the fields of the kernel's `Spec`.

  Attributes:
    model: "linear" or "mlp", see `memcomp_kernels.test_time_training.types`,
      as all down to `norm_eps`.
    expansion: hidden features of "mlp" per feature of a key.
    gradient_at: "chunk_start" or "token".
    chunk_size: tokens that share a chunk-start gradient.
    forget_gate: whether the inner weights decay.
    norm_eps: inside the inner layer norm.
    heads: memories side by side.
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
      0 for none.
    weight_std: of the inner model's initial weights, which are learned, at
      the start.
    convolution_width: taps of short convolutions on q and k, which then share
      a projection (the paper's Mamba backbone); 0 for none.
  """

  # Test runners collect classes by this name's beginning.
  __test__ = False

  model: str = "linear"
  expansion: int = 4
  gradient_at: str = "chunk_start"
  chunk_size: int = 16
  forget_gate: bool = False
  norm_eps: float = 1e-6
  heads: int = 12
  key_dim: int = 64
  value_dim: int = 64
  decay_init: float = 0.982
  write_rate_init: float = 0.5
  write_rate_scale: float = 1.0
  average_step: bool = True
  rotary_dim: int = 64
  weight_std: float = 0.02
  convolution_width: int = 0

  def spec(self) -> test_time_training.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    fields = dataclasses.fields(test_time_training.Spec)
    return test_time_training.Spec(
      **{field.name: getattr(self, field.name) for field in fields}
    )

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.spec()
    mixer.require_positive(self, "heads", "key_dim")
    if self.value_dim != self.key_dim:
      raise ValueError(
        f"value_dim={self.value_dim} must be key_dim={self.key_dim}: the inner"
        " model answers x + LN(model(x))"
      )
    if not 0 < self.decay_init < 1:
      raise ValueError(f"decay_init={self.decay_init} must be in (0, 1)")
    if not 0 < self.write_rate_init < self.write_rate_scale:
      raise ValueError(
        f"write_rate_init={self.write_rate_init} must be in"
        f" (0, write_rate_scale={self.write_rate_scale})"
      )
    if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.key_dim:
      raise ValueError(
        f"rotary_dim={self.rotary_dim} must be even and in"
        f" [0, key_dim={self.key_dim}]"
      )
    if not self.weight_std > 0:
      raise ValueError(f"weight_std={self.weight_std} must be positive")
    if self.convolution_width < 0 or self.convolution_width == 1:
      raise ValueError(
        f"convolution_width={self.convolution_width} must be 0 or at least 2"
      )

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


class TestTimeTraining(nnx.Module):
  """The test-time training mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  __test__ = False

  def __init__(
    self,
    config: TestTimeTrainingConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    self.spec = config.spec()
    heads, dim, taps = config.heads, config.key_dim, config.convolution_width
    width = heads * dim

    def project(width, bias=None):
      return linear.Linear(
        d_model, width, ("embed", "heads"), std=std, bias=bias, rngs=rngs
      )

    # With convolutions both come from one projection.
    self.query = nnx.data(None) if taps else project(width)
    self.key = project(width)
    self.value = project(width)
    self.gate = project(width)
    rate = config.write_rate_init / config.write_rate_scale
    self.write_rate = project(heads, linear.logit(rate))
    self.log_decay = nnx.data(None)
    if config.forget_gate:
      self.log_decay = project(heads, linear.logit(config.decay_init))
    self.step_offset = nnx.data(None)
    if config.average_step and self.spec.stale:
      self.step_offset = linear.constant_param(
        jnp.zeros(config.chunk_size), (None,)
      )
    self.out = linear.Linear(
      width, d_model, ("heads", "embed"), std=out_std, rngs=rngs
    )
    self.post_norm = norm.LayerNorm(width, name="heads")
    self.query_convolution = short_convolution.make(width, taps, rngs=rngs)
    self.key_convolution = short_convolution.make(width, taps, rngs=rngs)

    def weight(before, after):
      return linear.normal_param(
        rngs,
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
    self.rotary = rotary.Rotary(dim=config.rotary_dim)
    self.heads, self.dim = heads, dim
    self.write_rate_scale = config.write_rate_scale / dim

  def init_state(
    self, batch: int, length: int | None = None
  ) -> TestTimeTrainingState:
    """The state before the first token; holds the learned inner weights."""
    del length
    layers = tuple(
      test_time_training.Layer(weight[...], bias[...])
      for weight, bias in zip(self.weights, self.biases, strict=True)
    )
    memory = test_time_training.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.dim,
      value_dim=self.dim,
      layers=layers,
      norm_scale=self.norm_scale[...],
      norm_bias=self.norm_bias[...],
    )
    return TestTimeTrainingState(
      short_convolution.init_taps(self.query_convolution, batch),
      short_convolution.init_taps(self.key_convolution, batch),
      memory,
    )

  def memories(self, state: TestTimeTrainingState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return tuple(layer.weight for layer in state.memory.layers)

  def _with_norm(self, memory: test_time_training.State):
    """Puts the learned inner norm in, which rides along in the state."""
    shape = memory.norm_scale.shape
    return memory._replace(
      norm_scale=jnp.broadcast_to(self.norm_scale[...], shape),
      norm_bias=jnp.broadcast_to(self.norm_bias[...], shape),
    )

  def _inputs(self, x, state: TestTimeTrainingState, segment_ids):
    """Projects `[batch, time, d_model]` to the memory's inputs and taps."""
    memory = state.memory
    convolve = functools.partial(
      short_convolution.apply,
      segment_ids=segment_ids,
      segment_id=memory.segment_id,
    )
    key = self.key(x)
    query = key if self.query is None else self.query(x)
    query, query_taps = convolve(
      self.query_convolution, query, state.query_taps
    )
    key, key_taps = convolve(self.key_convolution, key, state.key_taps)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rate = jax.nn.sigmoid(self.write_rate(x).astype(wide))
    if self.log_decay is None:
      log_decay = jnp.zeros_like(rate)
    else:
      log_decay = jax.nn.log_sigmoid(self.log_decay(x).astype(wide))
    query, key, value, log_decay, rate = (
      linear.split_heads(y, self.heads)
      for y in (query, key, self.value(x), log_decay, rate)
    )
    scale = None
    if memory.position is not None:  # gradients at chunk starts
      place = contract.token_positions(
        segment_ids, memory.segment_id, memory.position, x.shape[1]
      )
      place = place % self.spec.chunk_size
      query, key = self.rotary(query, place), self.rotary(key, place)
      if self.step_offset is not None:
        # Weighed for all places of a chunk, then looked up.
        share = 1 / jnp.arange(1, self.spec.chunk_size + 1, dtype=wide)
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
    return inputs, (query_taps, key_taps)

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    y = y.reshape(*y.shape[:-2], -1)
    return self.out(self.post_norm(y) * jax.nn.gelu(self.gate(x)))

  def __call__(
    self, x: jax.Array, state: TestTimeTrainingState, context: mixer.Context
  ) -> tuple[jax.Array, TestTimeTrainingState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    inputs, taps = self._inputs(x, state, segment_ids)
    chunk = sharding.on_mesh(test_time_training.chunk)
    fresh = self.init_state(x.shape[0]).memory
    memory, y = chunk(
      self._with_norm(state.memory),
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=fresh if segment_ids is not None else None,
    )
    return self._output(x, y), TestTimeTrainingState(*taps, memory)

  def step(
    self, x: jax.Array, state: TestTimeTrainingState, context: mixer.Context
  ) -> tuple[jax.Array, TestTimeTrainingState]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    x = x[:, None]
    inputs, taps = self._inputs(x, state, None)
    memory, y = test_time_training.step(
      self._with_norm(state.memory),
      jax.tree.map(lambda a: a[:, 0], inputs),
      spec=self.spec,
    )
    y = self._output(x, y[:, None])[:, 0]
    return y, TestTimeTrainingState(*taps, memory)
