"""The OVQ mixer: online vector quantisation of keys and values.

x -> q, k, v (`layers.projection`, with the options of GPTAlpha-2), q and k of
length 1, q times a learned beta sqrt(key_dim) -> one softmax over a dictionary
and the current chunk -> W_o (the baseline of arXiv 2605.09877; docs/ovq.md).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, projection
from memcomp_kernels.ovq import api as ovq


@dataclasses.dataclass(kw_only=True, slots=True)
class OVQConfig(projection.ProjectionConfig):
  """An OVQ mixer; further fields are those of `ProjectionConfig`.

  The dictionary knows no positions, so there are no rotary channels.

  Attributes:
    chunk_size: see `memcomp_kernels.ovq.types.Spec`, as all down to
      `normalize_rows`.
    max_rows: rows of the dictionary at most.
    growth: "plateau" or "linear".
    count_bias: rows weigh as many tokens as they stand for.
    normalize_rows: rows have length 1 after every update.
  """

  chunk_size: int = 256
  max_rows: int = 1024
  growth: str = "plateau"
  count_bias: bool = True
  normalize_rows: bool = False
  rotary_dim: int = 0
  normalize_key: str = "l2"

  def spec(self) -> ovq.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    fields = dataclasses.fields(ovq.Spec)
    return ovq.Spec(
      **{field.name: getattr(self, field.name) for field in fields}
    )

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.validate_projection()
    self.spec()
    if self.rotary_dim:
      raise ValueError(
        f"rotary_dim={self.rotary_dim} must be 0: the dictionary knows no"
        " positions"
      )

  def state_floats(self, length: int) -> int:
    """Floats of dictionary and chunk after `length` tokens, for one layer."""
    whole = length // self.chunk_size * self.chunk_size
    row = self.key_dim + self.value_dim
    rows = self.spec().rows(whole) * (row + 1)
    return self.heads * (rows + min(length, self.chunk_size) * row)

  def memory_flops(self, length: int) -> int:
    """Mean forward flops of scores, sums and choices per token, one layer."""
    spec, chunk = self.spec(), self.chunk_size
    chunks = -(-length // chunk)
    rows = sum(spec.rows(c * chunk) for c in range(chunks)) / chunks
    dims = self.key_dim + self.value_dim
    # Reading, then products to choose by and the sums into the rows.
    return round(2 * self.heads * dims * (2 * rows + (chunk + 1) / 2))


class OVQState(NamedTuple):
  """State of the projections and the memory."""

  projection: projection.ProjectionState
  memory: ovq.State


class OVQ(nnx.Module):
  """The OVQ mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: OVQConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    self.projection = projection.Projection(config, d_model, std=std, rngs=rngs)
    self.beta = linear.constant_param(jnp.ones(config.heads), ("heads",))
    self.out = linear.Linear(
      config.heads * config.value_dim,
      d_model,
      ("heads", "embed"),
      std=out_std,
      rngs=rngs,
    )
    self.spec = config.spec()
    self.heads = config.heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim

  def at_depth(self, depth: jax.Array) -> None:
    """Starts as a layer at `depth` in [0, 1)."""
    self.projection.at_depth(depth)

  def value_of(self, x: jax.Array) -> jax.Array:
    """The value projection of `x`, for the value residuals of later layers."""
    return self.projection.value(x)

  def init_state(self, batch: int, length: int | None = None) -> OVQState:
    """The state before the first token: an empty dictionary."""
    del length
    memory = ovq.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
    )
    return OVQState(self.projection.init_state(batch), memory)

  def memories(self, state: OVQState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return state.memory.keys, state.memory.values

  def _inputs(self, x, state: OVQState, context: mixer.Context):
    memory = state.memory
    query, key, value, projected = self.projection(
      x,
      state.projection,
      context,
      segment_id=memory.segment_id,
      # Of no consequence without rotary channels.
      position=memory.position,
    )
    scale = math.sqrt(self.key_dim) * self.beta[...]
    query = query * scale.astype(query.dtype)[:, None]
    return ovq.Inputs(query=query, key=key, value=value), projected

  def __call__(
    self, x: jax.Array, state: OVQState, context: mixer.Context
  ) -> tuple[jax.Array, OVQState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    inputs, projected = self._inputs(x, state, context)
    chunk = sharding.on_mesh(ovq.chunk)
    fresh = jax.tree.map(jnp.zeros_like, state.memory)
    memory, y = chunk(
      state.memory,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=fresh if segment_ids is not None else None,
    )
    y = self.out(y.reshape(*x.shape[:2], -1))
    return y, OVQState(projected, memory)

  def step(
    self, x: jax.Array, state: OVQState, context: mixer.Context
  ) -> tuple[jax.Array, OVQState]:
    """Mixes one token `[batch, d_model]`."""
    if context.first_value is not None:
      first = context.first_value[:, None]
      context = context._replace(first_value=first)
    inputs, projected = self._inputs(x[:, None], state, context)
    memory, y = ovq.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    y = self.out(y.reshape(x.shape[0], -1))
    return y, OVQState(projected, memory)
