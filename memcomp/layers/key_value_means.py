"""The Key-Value Means mixer (arXiv 2605.09877).

x -> q, k, v (`layers.projection`, with the options of GPTAlpha-2) and a merge
gate 1 + ELU(x W_g) -> one softmax over a compressed memory and a window -> W_o.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import base, linear, options, parameters, projection, rotary
from memcomp_kernels import key_value_means
from memcomp_kernels.key_value_means import budgets
from memcomp_kernels.options import at_least, option


@options.config_class
class KeyValueMeansConfig(projection.ProjectionConfig):
  """Options of Key-Value Means, in addition to `ProjectionConfig`.

  The defaults are the paper's: half of the key is rotated, query and key have a
  layer norm, and projections mix with those of the previous token. The
  `rotary_dim` rotated channels of keys are zeroed for the memory, which has no
  positions.

  Attributes:
    budget: number of rows as a function of tokens: "fixed" (`budget_rows`),
      "power" (max(budget_rows, floor(budget_scale * tokens^budget_exponent))),
      "saturating" (floor(N tokens / (N + tokens)), N = budget_rows), or your
      own function as "module:name".
    budget_rows: see `budget`.
    budget_scale: see `budget`.
    budget_exponent: see `budget`.
    merge_gate: whether each merged token has a learned weight; if False, 1.
    temperatures: whether the scores of memory and window have learned factors,
      two per head; if False, 1.
  """

  op = key_value_means
  left_out = ("norm_eps", "radius_eps")

  budget: str = "fixed"
  budget_rows: int = option(256, at_least(1))
  budget_scale: float = 16.0
  budget_exponent: float = 0.5
  merge_gate: bool = True
  temperatures: bool = True
  rotary_frequencies: str = "inclusive"
  normalize_key: str = "layer"
  token_shift: bool = True

  def fill(self, d_model: int) -> dict[str, Any]:
    """The sizes that the rule determines; by default half the key rotates."""
    found = options.MixerConfig.fill(self, d_model)
    return found | rotary.fill(self, found, share=0.5)

  def derived(self) -> dict[str, Any]:
    """The rotated channels, and the budget as a function."""
    return {"rotary_dim": self.rotary_dim or 0, "budget": self._budget()}

  def check(self) -> None:
    """Raises ValueError if no channel of the key is left without a rotation."""
    projection.ProjectionConfig.check(self)
    if self.key_dim and (self.rotary_dim or 0) >= self.key_dim:
      raise ValueError(
        f"rotary_dim={self.rotary_dim} must be less than key_dim="
        f"{self.key_dim}: the memory keeps only channels that are not rotated"
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


class KeyValueMeans(projection.ProjectedMixer):
  """Key-Value Means: projections and a gate around the memory."""

  Config = KeyValueMeansConfig
  memory_fields = ("keys", "values")

  def build(self, config: KeyValueMeansConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    self.projection = projection.Projection(
      config, self.d_model, std=make.std, rngs=make.rngs
    )
    self.merge_gate = nnx.data(None)
    if config.merge_gate:
      self.merge_gate = make.project(self.heads)
    self.temperatures = nnx.data(None)
    if config.temperatures:
      self.temperatures = linear.constant_param(
        jnp.ones((self.heads, 2)), ("heads", None)
      )
    of_key = ("key_dim",)
    self.norm_scale = linear.constant_param(jnp.ones(self.key_dim), of_key)
    self.norm_bias = linear.constant_param(jnp.zeros(self.key_dim), of_key)
    self.out = make.out(self.heads * self.value_dim)

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> projection.ProjectedState:
    """The state before the first token, with rows for `length` tokens."""
    memory = self.load(self.init_memory(batch, length=length))
    return projection.ProjectedState(self.projection.init_state(batch), memory)

  def load(self, memory):
    """Copies learned parameters into the memory state, which contains them."""
    memory = memory._replace(
      norm_scale=base.copied(self.norm_scale, memory.norm_scale),
      norm_bias=base.copied(self.norm_bias, memory.norm_bias),
    )
    if self.temperatures is not None:
      memory = memory._replace(
        temperatures=base.copied(self.temperatures, memory.temperatures)
      )
    return memory

  def fresh_memory(self, batch, memory, call):
    """An empty memory of the same capacity, with the learned parameters."""
    return self.op.fresh_state(memory, self.spec)

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    query, key, value, state = self.project(x, state, call)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gate = jnp.ones((*x.shape[:2], self.heads, 1), wide)
    if self.merge_gate is not None:
      logit = base.wide(self.merge_gate(x))
      gate = self.split(1 + jax.nn.elu(logit))
    inputs = key_value_means.Inputs(
      query=query, key=key, value=value, merge_gate=gate
    )
    return inputs, state
