"""The OVQ mixer: online vector quantisation of keys and values.

x -> q, k, v (`layers.projection`, with the options of GPTAlpha-2), q and k of
length 1, q times a learned beta sqrt(key_dim) -> one softmax over the
dictionary and the current chunk -> W_o (baseline of arXiv 2605.09877;
docs/ovq.md).
"""

import math

import jax
import jax.numpy as jnp

from memcomp.layers import linear, options, parameters, projection
from memcomp_kernels import ovq


@options.config_class
class OVQConfig(projection.ProjectionConfig):
  """Options of OVQ, in addition to `ProjectionConfig`.

  Attributes:
    rotary_dim: always 0, because the dictionary knows no positions.
  """

  op = ovq

  rotary_dim: int | None = 0
  normalize_key: str = "l2"
  token_shift: bool = True

  def check(self) -> None:
    """Raises ValueError if there are rotary channels."""
    if self.rotary_dim != 0:
      raise ValueError(
        f"rotary_dim={self.rotary_dim} must be 0: the dictionary knows no"
        " positions"
      )


class OVQ(projection.ProjectedMixer):
  """OVQ: projections around the dictionary."""

  Config = OVQConfig
  memory_fields = ("keys", "values")

  def build(self, config: OVQConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    self.projection = projection.Projection(
      config, self.d_model, std=make.std, rngs=make.rngs
    )
    self.beta = linear.constant_param(jnp.ones(self.heads), ("heads",))
    self.out = make.out(self.heads * self.value_dim)

  def fresh_memory(self, batch, memory, call):
    """An empty dictionary."""
    return jax.tree.map(jnp.zeros_like, memory)

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    query, key, value, state = self.project(x, state, call)
    scale = math.sqrt(self.key_dim) * self.beta[...]
    query = query * scale.astype(query.dtype)[:, None]
    return ovq.Inputs(query=query, key=key, value=value), state
