"""The Tensor Cache mixer (arXiv 2605.22884).

x -> q, k, v (`layers.projection`, rotary positions) -> local attention over a
window, and a memory that is written with per-head gates and read by q:

  y = y_local W_o + sigmoid(g) (r W_tc)                                 (5)

With slots, l_s(x) = <unit(x), unit(slot_key_s)> / (sqrt(d) temperature) routes
reads by the query (softmax over the top k) and writes by the key or the query
(one slot, straight through) (11)-(12). What the paper leaves open is in
docs/tensor_cache.md.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, projection
from memcomp_kernels.tensor_cache import api as tensor_cache

# Logits of decays and rates are clamped to +-10: decays stay below 0.99996.
_LARGEST_LOGIT = 10.0


@dataclasses.dataclass(kw_only=True, slots=True)
class TensorCacheConfig(projection.ProjectionConfig):
  """A Tensor Cache mixer; further fields are those of `ProjectionConfig`.

  `normalize_key` is of query and key everywhere, `unit_keys` and `unit_queries`
  of the memory only.

  Attributes:
    window_size: see `memcomp_kernels.tensor_cache.types.Spec`, as all down to
      `read_norm`.
    sink_tokens: first tokens that never leave the window.
    rule: "outer", "delta" or "wedge".
    write_population: "all" or "evicted".
    chunk_size: tokens between two reads of a new memory, with "all".
    chunk_mean: the shortcut of writing chunk means (an ablation).
    num_slots: memories that are routed to.
    timescales: 1, or 2 for a fast and a slow memory.
    route_by: whose route an evicted token takes, "key" or "query".
    read_after_write: read what is just evicted.
    unit_keys: k / |k| on its way into the memory.
    unit_queries: q / |q| on its way to the memory.
    value_scale: factor of values in the memory.
    read_norm: reads divided by max(|q . z|, 1).
    decay_init: lambda at the start, of the only or the fast memory.
    write_rate_init: eta at the start, of the only or the fast memory.
    slow_decay_init: lambda at the start, of the slow memory.
    slow_write_rate_init: eta at the start, of the slow memory.
    read_gate_init: g at the start; the memory's read has weight sigmoid(g).
    token_gate: g depends on the token, by a map that starts at zero.
    top_k_slots: slots that a token reads.
    temperature: of the routes; 1 / sqrt(key_dim) makes them sharp enough to
      choose by.
  """

  window_size: int = 512
  sink_tokens: int = 0
  rule: str = "outer"
  write_population: str = "all"
  chunk_size: int = 64
  chunk_mean: bool = False
  num_slots: int = 1
  timescales: int = 1
  route_by: str = "key"
  read_after_write: bool = False
  unit_keys: bool = False
  unit_queries: bool = False
  value_scale: float = 1.0
  read_norm: bool = False
  decay_init: float = 0.995
  write_rate_init: float = 0.05
  slow_decay_init: float = 0.9995
  slow_write_rate_init: float = 0.01
  read_gate_init: float = -2.0
  token_gate: bool = False
  top_k_slots: int = 1
  temperature: float = 1.0

  @property
  def random(self) -> bool:
    """Whether training it uses `Context.noise`: routes of writes are drawn."""
    return self.num_slots > 1

  def spec(self) -> tensor_cache.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    names = [field.name for field in dataclasses.fields(tensor_cache.Spec)]
    return tensor_cache.Spec(**{name: getattr(self, name) for name in names})

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.validate_projection()
    self.spec()
    if self.rule == "wedge" and self.key_dim != self.value_dim:
      raise ValueError(
        f'rule="wedge" needs key_dim={self.key_dim} and'
        f" value_dim={self.value_dim} equal"
      )
    largest = 1 / (1 + math.exp(-_LARGEST_LOGIT))
    for name in (
      "decay_init",
      "write_rate_init",
      "slow_decay_init",
      "slow_write_rate_init",
    ):
      if not 1 - largest < getattr(self, name) < largest:
        raise ValueError(
          f"{name}={getattr(self, name)} must be in"
          f" ({1 - largest:.6f}, {largest:.6f})"
        )
    if not 1 <= self.top_k_slots <= self.num_slots:
      raise ValueError(
        f"top_k_slots={self.top_k_slots} must be in"
        f" [1, num_slots={self.num_slots}]"
      )
    if not self.temperature > 0:
      raise ValueError(f"temperature={self.temperature} must be positive")

  def state_floats(self, length: int) -> int:
    """Floats of window and memory after `length` tokens, for one layer."""
    kept = min(length, self.window_size)
    window = kept * (self.key_dim + self.value_dim)
    if self.spec().routes_evicted:
      window += kept * self.num_slots
    lanes = self.timescales * self.num_slots
    columns = self.value_dim + self.read_norm
    return self.heads * (window + lanes * self.key_dim * columns)

  def memory_flops(self, length: int) -> int:
    """Mean forward flops of window and memory per token, for one layer."""
    window = min(self.window_size, length)
    pairs = window * (window + 1) // 2 + (length - window) * window
    local = 2 * (self.key_dim + self.value_dim) * pairs // length
    passes = {"outer": 2, "delta": 3, "wedge": 3}[self.rule]
    lanes = self.timescales * self.num_slots
    memory = 2 * passes * lanes * self.key_dim * self.value_dim
    return self.heads * (local + memory)


class TensorCacheState(NamedTuple):
  """State of the projections, and of window and memory."""

  projection: projection.ProjectionState
  memory: tensor_cache.State


class TensorCache(nnx.Module):
  """The Tensor Cache mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the local attention's output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: TensorCacheConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads, value_width = config.heads, config.heads * config.value_dim
    self.projection = projection.Projection(config, d_model, std=std, rngs=rngs)

    def out(std):
      return linear.Linear(
        value_width, d_model, ("heads", "embed"), std=std, rngs=rngs
      )

    self.out, self.memory_out = out(out_std), out(std)

    def logits(*probabilities):
      row = jnp.array(
        [linear.logit(p) for p in probabilities[: config.timescales]]
      )
      return linear.constant_param(
        jnp.broadcast_to(row, (heads, config.timescales)), ("heads", None)
      )

    self.log_decay = logits(config.decay_init, config.slow_decay_init)
    self.write_rate = logits(
      config.write_rate_init, config.slow_write_rate_init
    )
    self.read_mix = nnx.data(
      linear.constant_param(jnp.zeros(heads), ("heads",))
      if config.timescales > 1
      else None
    )
    self.read_gate = linear.constant_param(
      jnp.full(1, config.read_gate_init), (None,)
    )
    self.token_gate = nnx.data(
      linear.Linear(d_model, 1, ("embed", None), std=0.0, rngs=rngs)
      if config.token_gate
      else None
    )
    self.slot_keys = nnx.data(
      linear.normal_param(
        rngs,
        (heads, config.num_slots, config.key_dim),
        ("heads", "slots", "key_dim"),
        std=std,
      )
      if config.num_slots > 1
      else None
    )
    self.spec = config.spec()
    self.heads = heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.top_k_slots = config.top_k_slots
    self.temperature = config.temperature

  def at_depth(self, depth: jax.Array) -> None:
    """Starts as a layer at `depth` in [0, 1)."""
    self.projection.at_depth(depth)

  def value_of(self, x: jax.Array) -> jax.Array:
    """The value projection of `x`, for the value residuals of later layers."""
    return self.projection.value(x)

  def init_state(
    self, batch: int, length: int | None = None
  ) -> TensorCacheState:
    """The state before the first token: an empty window, a zero memory."""
    del length
    return TensorCacheState(
      self.projection.init_state(batch), self._memory(batch)
    )

  def _memory(self, batch):
    return tensor_cache.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
    )

  def memories(self, state: TensorCacheState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return (state.memory.memories.memory,)

  def _route_logits(self, slot_keys, x: jax.Array) -> jax.Array:
    """(11) of queries or keys `[batch, time, heads, key]`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum(
      "bthk,hsk->bths",
      tensor_cache.unit(x.astype(wide)),
      tensor_cache.unit(slot_keys[...].astype(wide)),
      precision=jax.lax.Precision.HIGHEST,
    )
    return logits / (math.sqrt(self.key_dim) * self.temperature)

  def _inputs(self, x, state, context):
    query, key, value, projected = self.projection(
      x,
      state.projection,
      context,
      segment_id=state.memory.segment_id,
      position=state.memory.position,
    )

    def gate(parameter):
      logit = jnp.clip(parameter[...], -_LARGEST_LOGIT, _LARGEST_LOGIT)
      shape = (*x.shape[:2], *logit.shape)
      return jnp.broadcast_to(logit.astype(jnp.float32), shape)

    inputs = tensor_cache.Inputs(
      query=query,
      key=key,
      value=value,
      log_decay=jax.nn.log_sigmoid(gate(self.log_decay)),
      write_rate=jax.nn.sigmoid(gate(self.write_rate)),
    )
    if self.read_mix is not None:
      mix = jax.nn.sigmoid(gate(self.read_mix))[..., None]
      inputs = inputs._replace(read_mix=mix)
    if self.slot_keys is not None:
      reads = self._route_logits(self.slot_keys, query)
      writes = reads
      if self.spec.route_by == "key":
        writes = self._route_logits(self.slot_keys, key)
      inputs = inputs._replace(
        read_route=_top_k(reads, self.top_k_slots),
        write_route=_straight_through(writes, self.temperature, context.noise),
      )
    return inputs, projected

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    """(5) of `[batch, time, heads, 2 * value]`."""
    local, read = (
      part.reshape(*x.shape[:-1], -1) for part in jnp.split(y, 2, axis=-1)
    )
    gate = self.read_gate[...].astype(jnp.float32)
    if self.token_gate is not None:
      gate = gate + self.token_gate(x).astype(jnp.float32)
    gate = jax.nn.sigmoid(gate).astype(x.dtype)
    return self.out(local) + gate * self.memory_out(read)

  def __call__(
    self,
    x: jax.Array,
    state: TensorCacheState,
    context: mixer.Context,
  ) -> tuple[jax.Array, TensorCacheState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    inputs, projected = self._inputs(x, state, context)
    chunk = sharding.on_mesh(
      tensor_cache.chunk, over_time=tensor_cache.over_time(self.spec)
    )
    # A fresh state is what segments start from, and kernels want to know.
    restarts = context.segment_ids is not None and context.seen != 0
    memory, y = chunk(
      state.memory,
      inputs,
      spec=self.spec,
      segment_ids=context.segment_ids,
      reset_state=self._memory(x.shape[0]) if restarts else None,
      seen=context.seen,
    )
    return self._output(x, y), TensorCacheState(projected, memory)

  def step(
    self,
    x: jax.Array,
    state: TensorCacheState,
    context: mixer.Context,
  ) -> tuple[jax.Array, TensorCacheState]:
    """Mixes one token `[batch, d_model]` in constant time."""
    if context.first_value is not None:
      first = context.first_value[:, None]
      context = context._replace(first_value=first)
    inputs, projected = self._inputs(x[:, None], state, context)
    memory, y = tensor_cache.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    y = self._output(x[:, None], y[:, None])[:, 0]
    return y, TensorCacheState(projected, memory)


def _top_k(logits: jax.Array, k: int) -> jax.Array:
  """Softmax over the k largest of the last axis, zero elsewhere."""
  slots = logits.shape[-1]
  chosen = jax.nn.one_hot(jax.lax.top_k(logits, k)[1], slots, dtype=bool)
  chosen = jnp.any(chosen, axis=-2)
  return jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), axis=-1)


def _straight_through(logits, temperature, noise) -> jax.Array:
  """One-hot of the largest, with the gradient of a (Gumbel-)softmax."""
  if noise is not None:
    logits = logits + jax.random.gumbel(noise, logits.shape, logits.dtype)
  soft = jax.nn.softmax(logits / temperature, axis=-1)
  hard = jax.nn.one_hot(
    jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=soft.dtype
  )
  return hard + (soft - jax.lax.stop_gradient(soft))
