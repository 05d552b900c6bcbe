"""The Tensor Cache mixer (arXiv 2605.22884).

x -> q, k, v (`layers.projection`, rotary positions) -> local attention over a
window, and a memory that per-head gates write and q reads:

  y = (y_local + sigmoid(g) r) W_o

or, with `memory_output` as in the paper, y_local W_o + sigmoid(g) (r W_tc) (5).

With slots, l_s(x) = <unit(x), unit(slot_key_s)> / (sqrt(d) temperature) routes
reads by the query (softmax over the top k), and writes by the key or the query
(one slot, straight through) (11)-(12). docs/tensor_cache.md explains what the
paper leaves open.
"""

import math
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import base, linear, options, parameters, projection
from memcomp_kernels import tensor_cache
from memcomp_kernels.options import option, positive
from memcomp_kernels.tensor_cache import reference

# Logits of decays and rates are clamped to +-10, so decays are below 0.99996.
_LARGEST_LOGIT = 10.0
_LARGEST = 1 / (1 + math.exp(-_LARGEST_LOGIT))


def _share(x: float) -> str | None:
  """Checks the range of a sigmoid of a clamped logit."""
  if 1 - _LARGEST < x < _LARGEST:
    return None
  return f"must be in ({1 - _LARGEST:.6f}, {_LARGEST:.6f})"


@options.config_class
class TensorCacheConfig(projection.ProjectionConfig):
  """Options of Tensor Cache, in addition to `ProjectionConfig`.

  `normalize_key` applies to query and key everywhere, but `unit_keys` and
  `unit_queries` only in the memory.

  Attributes:
    unit_keys: whether the memory receives keys of length 1, as in the authors'
      code. Without, it loses to its own window on text
      (docs/results/compare.md). The paper's main runs have False, with which
      recall is learned faster (docs/results/gaps.md).
    unit_queries: whether the memory receives queries of length 1.
    decay_init: initial lambda of the only or the fast memory.
    write_rate_init: initial eta of the only or the fast memory. With unit keys
      recall is learned far faster from 0.8, and text costs .03 bits more; with
      `read_gate_speed=64.0` nothing in the comparison, and .04 on Shakespeare
      (docs/results/compare.md).
    slow_decay_init: initial lambda of the slow memory.
    slow_write_rate_init: initial eta of the slow memory.
    read_gate_init: initial g; the memory's read has weight sigmoid(g). With -5
      the layer starts as its window; recall over a gap was then not learned in
      300 steps (docs/results/gaps.md).
    read_gate_speed: how many times as far as other parameters an optimizer such
      as AdamW moves g in a step, > 0: the parameter is g / read_gate_speed.
      With 1, as in the paper, training hardly moves g
      (docs/results/compare.md). The map of `token_gate` is not scaled.
    token_gate: whether g depends on the token, by a map that starts at zero.
    memory_output: whether the memory has an output projection of its own, W_tc,
      as in the paper. Its parameters are worth more in the channel mixer
      (docs/results/compare.md).
    route_by: whose scores choose the slots that a token is written to: its own
      key's ("key"), or a query's ("query"), with "all" its own and with
      "evicted" that of the token that evicts it.
    top_k_slots: number of slots that a token reads.
    temperature: temperature of the routes; 1 / sqrt(key_dim) makes them sharp
      enough for choices.
  """

  op = tensor_cache
  earlier = MappingProxyType({"memory_output": True})

  unit_keys: bool = True
  unit_queries: bool = True
  decay_init: float = option(0.995, _share)
  write_rate_init: float = option(0.05, _share)
  slow_decay_init: float = option(0.9995, _share)
  slow_write_rate_init: float = option(0.01, _share)
  read_gate_init: float = -2.0
  read_gate_speed: float = option(1.0, positive)
  token_gate: bool = False
  memory_output: bool = False
  top_k_slots: int = 1
  temperature: float = option(1.0, positive)

  @property
  def random(self) -> bool:
    """Whether training draws random numbers, which it does for write routes."""
    return self.spec().num_slots > 1

  def check(self) -> None:
    """Raises ValueError if fields contradict each other."""
    projection.ProjectionConfig.check(self)
    spec = self.spec()
    if spec.rule == "wedge" and self.key_dim != self.value_dim:
      raise ValueError(
        f'rule="wedge" needs key_dim={self.key_dim} and'
        f" value_dim={self.value_dim} equal"
      )
    if not 1 <= self.top_k_slots <= spec.num_slots:
      raise ValueError(
        f"top_k_slots={self.top_k_slots} must be in"
        f" [1, num_slots={spec.num_slots}]"
      )


class TensorCache(projection.ProjectedMixer):
  """Tensor Cache; `out_std` is for W_o alone, and W_tc starts with `std`."""

  Config = TensorCacheConfig
  memory_fields = ("memories.memory",)

  def build(self, config: TensorCacheConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    heads, values = self.heads, self.heads * self.value_dim
    slots, timescales = self.spec.num_slots, self.spec.timescales
    self.projection = projection.Projection(
      config, self.d_model, std=make.std, rngs=make.rngs
    )
    self.out = make.out(values)
    self.memory_out = nnx.data(
      make.out(values, make.std) if config.memory_output else None
    )

    def logits(*probabilities):
      row = jnp.array([linear.logit(p) for p in probabilities[:timescales]])
      return linear.constant_param(
        jnp.broadcast_to(row, (heads, timescales)), ("heads", None)
      )

    self.log_decay = logits(config.decay_init, config.slow_decay_init)
    self.write_rate = logits(
      config.write_rate_init, config.slow_write_rate_init
    )
    self.read_mix = nnx.data(
      linear.constant_param(jnp.zeros(heads), ("heads",))
      if timescales > 1
      else None
    )
    self.read_gate_speed = config.read_gate_speed
    self.read_gate = linear.constant_param(
      jnp.full(1, config.read_gate_init / config.read_gate_speed), (None,)
    )
    self.token_gate = nnx.data(
      linear.Linear(self.d_model, 1, ("embed", None), std=0.0, rngs=make.rngs)
      if config.token_gate
      else None
    )
    self.slot_keys = nnx.data(
      linear.normal_param(
        make.rngs,
        (heads, slots, self.key_dim),
        ("heads", "slots", "key_dim"),
        std=make.std,
      )
      if slots > 1
      else None
    )
    self.top_k_slots = config.top_k_slots
    self.temperature = config.temperature

  def fresh_memory(self, batch, memory, call):
    """An empty window and a zero memory.

    None for a fresh state: segments can start from it, and kernels use the
    fact.
    """
    return None if call.max_position == 0 else self.init_memory(batch)

  def _route_logits(self, slot_keys, x: jax.Array) -> jax.Array:
    """Equation (11) for queries or keys `[batch, time, heads, key]`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum(
      "bthk,hsk->bths",
      reference.unit(x.astype(wide)),
      reference.unit(slot_keys[...].astype(wide)),
      precision=jax.lax.Precision.HIGHEST,
    )
    return logits / (math.sqrt(self.key_dim) * self.temperature)

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    query, key, value, state = self.project(x, state, call)

    def gate(parameter):
      logit = jnp.clip(parameter[...], -_LARGEST_LOGIT, _LARGEST_LOGIT)
      shape = (*x.shape[:2], *logit.shape)
      return jnp.broadcast_to(base.wide(logit), shape)

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
        write_route=_straight_through(writes, self.temperature, call.noise),
      )
    return inputs, state

  def outputs(self, x, y):
    """Equation (5), or with one projection, for `[..., heads, 2 * value]`."""
    local, read = (linear.join_heads(part) for part in jnp.split(y, 2, axis=-1))
    gate = self.read_gate_speed * base.wide(self.read_gate[...])
    if self.token_gate is not None:
      gate = gate + base.wide(self.token_gate(x))
    gate = jax.nn.sigmoid(gate).astype(x.dtype)
    if self.memory_out is None:
      return self.out(local + gate * read)
    return self.out(local) + gate * self.memory_out(read)


def _top_k(logits: jax.Array, k: int) -> jax.Array:
  """Softmax over the k largest entries of the last axis, zero elsewhere."""
  slots = logits.shape[-1]
  chosen = jax.nn.one_hot(jax.lax.top_k(logits, k)[1], slots, dtype=bool)
  chosen = jnp.any(chosen, axis=-2)
  return jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), axis=-1)


def _straight_through(logits, temperature, noise) -> jax.Array:
  """One-hot of the maximum, with the gradient of a (Gumbel-)softmax."""
  if noise is not None:
    logits = logits + jax.random.gumbel(noise, logits.shape, logits.dtype)
  soft = jax.nn.softmax(logits / temperature, axis=-1)
  hard = jax.nn.one_hot(
    jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=soft.dtype
  )
  return hard + (soft - jax.lax.stop_gradient(soft))
