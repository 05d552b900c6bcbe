"""The Key-Value Means mixer (arXiv 2605.09877).

x -> q, k, v (`layers.projection`, with the options of GPTAlpha-2) and a merge
gate 1 + ELU(x W_g) -> one softmax over a compressed memory and a window -> W_o.
"""

import dataclasses
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, projection
from memcomp_kernels.key_value_means import api as key_value_means
from memcomp_kernels.key_value_means import budgets


@dataclasses.dataclass(kw_only=True, slots=True)
class KeyValueMeansConfig(projection.ProjectionConfig):
  """A Key-Value Means mixer; further fields are those of `ProjectionConfig`.

  The defaults are the paper's: half of the key is rotated, query and key have
  a layer norm. `rotary_dim` channels of a key are zeroed on its way into the
  memory, which knows no positions.

  Attributes:
    chunk_size: see `memcomp_kernels.key_value_means.types.Spec`, as
      `window_chunks`, `sink_rows`, `gate_appends`, `value_radius` and
      `max_length`.
    window_chunks: newest chunks that are attended to exactly.
    sink_rows: first rows, never merged into.
    gate_appends: weigh appended rows by the merge gate too.
    value_radius: read values at their first token's length; if False, as the
      mean over the row's tokens.
    max_length: tokens up to which the budget grows.
    budget: rows after so many tokens: "fixed" (`budget_rows`), "power"
      (max(budget_rows, floor(budget_scale * tokens^budget_exponent))),
      "saturating" (floor(N tokens / (N + tokens)), N = budget_rows), or
      "module:name", a function of your own from tokens to rows.
    budget_rows: see `budget`.
    budget_scale: see `budget`.
    budget_exponent: see `budget`.
    merge_gate: a learned weight for each merged token; if False, 1.
    temperatures: learned factors of the memory's and of the window's scores,
      two a head; if False, 1.
  """

  chunk_size: int = 256
  window_chunks: int = 2
  sink_rows: int = 1
  gate_appends: bool = False
  value_radius: bool = True
  max_length: int = 65536
  budget: str = "fixed"
  budget_rows: int = 256
  budget_scale: float = 16.0
  budget_exponent: float = 0.5
  merge_gate: bool = True
  temperatures: bool = True
  rotary_dim: int = 32
  rotary_frequencies: str = "inclusive"
  normalize_key: str = "layer"

  def spec(self) -> key_value_means.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    return key_value_means.Spec(
      chunk_size=self.chunk_size,
      window_chunks=self.window_chunks,
      sink_rows=self.sink_rows,
      rotary_dim=self.rotary_dim,
      budget=self._budget(),
      max_length=self.max_length,
      gate_appends=self.gate_appends,
      value_radius=self.value_radius,
    )

  def _budget(self) -> budgets.Budget:
    if self.budget == "fixed":
      return budgets.FixedBudget(self.budget_rows)
    if self.budget == "power":
      return budgets.PowerLawBudget(
        self.budget_scale, self.budget_exponent, self.budget_rows
      )
    if self.budget == "saturating":
      return budgets.SaturatingBudget(self.budget_rows)
    module, colon, name = self.budget.partition(":")
    if not colon:
      raise ValueError(
        f"budget={self.budget!r} is neither fixed, power nor saturating, nor"
        " module:name of a function"
      )
    try:
      return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
      raise ValueError(
        f"budget={self.budget!r} cannot be imported: {error}"
      ) from error

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.validate_projection()
    mixer.require_positive(self, "budget_rows")
    self.spec()

  def state_floats(self, length: int) -> int:
    """Floats of memory and window after `length` tokens, for one layer."""
    spec = self.spec()
    rows = spec.live_rows(max(length - 1, 0) // self.chunk_size)[-1]
    # A row also has a radius, a token of the window a gate.
    entries = rows + min(length, spec.window)
    return self.heads * entries * (self.key_dim + self.value_dim + 1)

  def memory_flops(self, length: int) -> int:
    """Mean forward flops of scores, sums and routing per token, one layer."""
    spec, chunk = self.spec(), self.chunk_size
    chunks = -(-length // chunk)
    rows = sum(spec.live_rows(chunks - 1)) / chunks
    before = sum(min(c, self.window_chunks - 1) for c in range(chunks))
    window = chunk * before / chunks + (chunk + 1) / 2
    dims = self.key_dim + self.value_dim
    # Reading both, then scores against the rows and the sums into them.
    return round(2 * self.heads * dims * (2 * rows + window))


class KeyValueMeansState(NamedTuple):
  """State of the projections and the memory."""

  projection: projection.ProjectionState
  memory: key_value_means.State


class KeyValueMeans(nnx.Module):
  """The Key-Value Means mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: KeyValueMeansConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads, key_dim = config.heads, config.key_dim
    self.projection = projection.Projection(config, d_model, std=std, rngs=rngs)
    self.merge_gate = nnx.data(None)
    if config.merge_gate:
      self.merge_gate = linear.Linear(
        d_model, heads, ("embed", "heads"), std=std, rngs=rngs
      )
    self.temperatures = nnx.data(None)
    if config.temperatures:
      self.temperatures = linear.constant_param(
        jnp.ones((heads, 2)), ("heads", None)
      )
    self.norm_scale = linear.constant_param(jnp.ones(key_dim), ("key_dim",))
    self.norm_bias = linear.constant_param(jnp.zeros(key_dim), ("key_dim",))
    self.out = linear.Linear(
      heads * config.value_dim,
      d_model,
      ("heads", "embed"),
      std=out_std,
      rngs=rngs,
    )
    self.spec = config.spec()
    self.heads = heads
    self.key_dim, self.value_dim = key_dim, config.value_dim

  def at_depth(self, depth: jax.Array) -> None:
    """Starts as a layer at `depth` in [0, 1)."""
    self.projection.at_depth(depth)

  def value_of(self, x: jax.Array) -> jax.Array:
    """The value projection of `x`, for the value residuals of later layers."""
    return self.projection.value(x)

  def init_state(
    self, batch: int, length: int | None = None
  ) -> KeyValueMeansState:
    """The state before the first token, with rows for `length` tokens."""
    memory = key_value_means.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
      length=length,
    )
    return KeyValueMeansState(
      self.projection.init_state(batch), self._with_parameters(memory)
    )

  def _with_parameters(self, memory: key_value_means.State):
    """Puts the learned numbers in, which ride along in the memory's state."""
    batch = memory.segment_id.shape[0]
    shape = (batch, self.heads, self.key_dim)
    memory = memory._replace(
      norm_scale=jnp.broadcast_to(self.norm_scale[...], shape),
      norm_bias=jnp.broadcast_to(self.norm_bias[...], shape),
    )
    if self.temperatures is not None:
      shape = (batch, self.heads, 2)
      memory = memory._replace(
        temperatures=jnp.broadcast_to(self.temperatures[...], shape)
      )
    return memory

  def memories(self, state: KeyValueMeansState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return state.memory.keys, state.memory.values

  def _inputs(self, x, state, context):
    query, key, value, projected = self.projection(
      x,
      state.projection,
      context,
      segment_id=state.memory.segment_id,
      position=state.memory.position,
    )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gate = jnp.ones((*x.shape[:2], self.heads, 1), wide)
    if self.merge_gate is not None:
      logit = self.merge_gate(x).astype(wide)
      gate = linear.split_heads(1 + jax.nn.elu(logit), self.heads)
    inputs = key_value_means.Inputs(
      query=query, key=key, value=value, merge_gate=gate
    )
    return inputs, projected

  def __call__(
    self, x: jax.Array, state: KeyValueMeansState, context: mixer.Context
  ) -> tuple[jax.Array, KeyValueMeansState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    inputs, projected = self._inputs(x, state, context)
    chunk = sharding.on_mesh(key_value_means.chunk)
    memory, fresh = self._with_parameters(state.memory), None
    if context.segment_ids is not None:
      empty = jax.tree.map(jnp.zeros_like, memory)
      fresh = empty._replace(
        temperatures=memory.temperatures,
        norm_scale=memory.norm_scale,
        norm_bias=memory.norm_bias,
      )
    memory, y = chunk(
      memory,
      inputs,
      spec=self.spec,
      segment_ids=context.segment_ids,
      reset_state=fresh,
      seen=context.seen,
    )
    y = self.out(y.reshape(*x.shape[:2], -1))
    return y, KeyValueMeansState(projected, memory)

  def step(
    self, x: jax.Array, state: KeyValueMeansState, context: mixer.Context
  ) -> tuple[jax.Array, KeyValueMeansState]:
    """Mixes one token `[batch, d_model]`."""
    if context.first_value is not None:
      first = context.first_value[:, None]
      context = context._replace(first_value=first)
    inputs, projected = self._inputs(x[:, None], state, context)
    memory, y = key_value_means.step(
      self._with_parameters(state.memory),
      jax.tree.map(lambda a: a[:, 0], inputs),
      spec=self.spec,
    )
    y = self.out(y.reshape(x.shape[0], -1))
    return y, KeyValueMeansState(projected, memory)
