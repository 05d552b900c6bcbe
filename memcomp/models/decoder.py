"""The language model: embed, scan over blocks, norm, head."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from memcomp import sharding
from memcomp.layers import linear, norm, short_convolution, trellis
from memcomp.models import block, registry
from memcomp_kernels import contract

REMAT = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "mixer_out": jax.checkpoint_policies.save_only_these_names("mixer_out"),
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a block keeps for its backward pass: everything, nothing but its input,
its input and the mixer's output, or the results of its linear maps."""

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(kw_only=True, slots=True)
class DecoderConfig:
  """A decoder of equal blocks.

  Attributes:
    vocab_size: token ids.
    d_model: width of the residual stream.
    num_layers: blocks.
    mlp_dim: hidden features of the SwiGLU channel mixer.
    mixer: the sequence mixer of every block.
    embedding_convolution: taps of a convolution on the embeddings; 0 for none.
    tied_embeddings: the head is the embedding table.
    init_std: of the weights at the start.
    embedding_std: of the embedding table at the start.
    dtype: of activations and matrix products, "float32" or "bfloat16";
      parameters, states, norms, gates and logits are float32 always.
    remat: what a block keeps for its backward pass, see `REMAT`.
  """

  vocab_size: int = 256
  d_model: int = 768
  num_layers: int = 12
  mlp_dim: int = 2048
  mixer: trellis.TrellisConfig = dataclasses.field(
    default_factory=trellis.TrellisConfig
  )
  embedding_convolution: int = 0
  tied_embeddings: bool = True
  init_std: float = 0.02
  embedding_std: float = 0.02
  dtype: str = "float32"
  remat: str = "none"

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    for name in ("vocab_size", "d_model", "num_layers", "mlp_dim"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    for name, choices in (("dtype", DTYPES), ("remat", tuple(REMAT))):
      if getattr(self, name) not in choices:
        raise ValueError(
          f"{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}"
        )
    width = self.embedding_convolution
    if width < 0 or width == 1:
      raise ValueError(f"embedding_convolution={width} must be 0 or at least 2")
    for name in ("init_std", "embedding_std"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")
    self.mixer.validate()


class DecoderState(NamedTuple):
  """Embedding taps (or None) and the blocks' states, stacked by layer."""

  taps: jax.Array | None
  segment_id: jax.Array
  layers: Any


class Decoder(nnx.Module):
  """A decoder-only language model.

  Args:
    config: its configuration.
    rngs: random streams.

  Raises:
    ValueError: a field of `config` is out of range.
  """

  def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
    config.validate()
    table = (config.vocab_size, config.d_model)
    self.embedding = linear.normal_param(
      rngs, table, ("vocab", "embed"), std=config.embedding_std
    )
    self.head = nnx.data(None)
    if not config.tied_embeddings:
      self.head = linear.normal_param(
        rngs, table, ("vocab", "embed"), std=config.init_std
      )
    self.convolution = nnx.data(None)
    if config.embedding_convolution:
      self.convolution = short_convolution.ShortConvolution(
        config.d_model, config.embedding_convolution, rngs=rngs
      )
    self.norm = norm.RMSNorm(config.d_model)

    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def build(rngs):
      return block.Block(config, rngs=rngs)

    self.layers = build(rngs.split(config.num_layers))
    self.dtype = config.dtype
    self.remat = config.remat

  def init_state(self, batch: int) -> DecoderState:
    """The state before the first token, learned memories included."""
    taps = None
    if self.convolution is not None:
      taps = self.convolution.init_state(batch)
    graphdef, params = nnx.split(self.layers)

    def one(params):
      return nnx.merge(graphdef, params).mixer.init_state(batch)

    return DecoderState(
      taps, jnp.zeros(batch, jnp.int32), jax.vmap(one)(params)
    )

  def __call__(
    self,
    tokens: jax.Array,
    *,
    state: DecoderState | None = None,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
  ) -> tuple[jax.Array, DecoderState]:
    """Runs many tokens.

    Args:
      tokens: int `[batch, time]`.
      state: before the first token; default a fresh one.
      segment_ids: `[batch, time]`, 0 is padding; None for one segment.
      positions: `[batch, time]`, within segments; for mixers that use them.

    Returns:
      hidden `[batch, time, d_model]` for `logits`, and the new state.
    """
    if state is None:
      state = self.init_state(tokens.shape[0])
    x, taps = self._embed(tokens, state, segment_ids)
    graphdef, params = nnx.split(self.layers)

    def body(x, layer):
      params, state = layer
      return nnx.merge(graphdef, params)(
        x, state, segment_ids=segment_ids, positions=positions
      )

    if self.remat != "none":
      body = jax.checkpoint(body, prevent_cse=False, policy=REMAT[self.remat])
    x, layers = lax.scan(body, x, (params, state.layers))
    if segment_ids is None:
      last = jnp.maximum(state.segment_id, 1)
    else:
      _, last = contract.segment_starts(segment_ids, state.segment_id)
    return self.norm(x), DecoderState(taps, last, layers)

  def step(
    self, tokens: jax.Array, state: DecoderState
  ) -> tuple[jax.Array, DecoderState]:
    """Runs one token a row, `[batch]`; returns logits `[batch, vocab]`."""
    x, taps = self._embed(tokens[:, None], state, None)
    graphdef, params = nnx.split(self.layers)

    def body(x, layer):
      params, state = layer
      return nnx.merge(graphdef, params).step(x, state)

    x, layers = lax.scan(body, x[:, 0], (params, state.layers))
    state = DecoderState(taps, jnp.maximum(state.segment_id, 1), layers)
    return self.logits(self.norm(x)), state

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Maps hidden `[..., d_model]` to float32 logits `[..., vocab]`."""
    table = self.embedding if self.head is None else self.head
    return jnp.einsum(
      "...d,vd->...v",
      hidden,
      table[...].astype(hidden.dtype),
      preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32),
    )

  def memory_norms(self, state: DecoderState) -> jax.Array:
    """Root mean square of each layer's memories, float32 `[layers]`."""
    graphdef, params = nnx.split(self.layers)

    def one(params, state):
      arrays = nnx.merge(graphdef, params).mixer.memories(state)
      squares = sum(jnp.sum(jnp.square(a)) for a in arrays)
      return jnp.sqrt(squares / sum(a.size for a in arrays))

    return jax.vmap(one)(params, state.layers)

  def _embed(self, tokens, state, segment_ids):
    x = jnp.take(self.embedding[...], tokens, axis=0).astype(self.dtype)
    taps = state.taps
    if self.convolution is not None:
      x, taps = self.convolution(
        x, taps, segment_ids=segment_ids, segment_id=state.segment_id
      )
    return sharding.constrain(x, "batch", "time", "act_embed"), taps


def memory_flops_per_token(config: DecoderConfig) -> int:
  """Forward flops of the memories per token, over all layers."""
  return config.num_layers * config.mixer.memory_flops()


def state_bytes(config: DecoderConfig) -> int:
  """Bytes of the float32 memories per sequence, over all layers."""
  return 4 * config.num_layers * config.mixer.state_floats()


def describe(config: DecoderConfig) -> str:
  """One line: mixer and sizes."""
  return (
    f"{registry.name_of(config.mixer)}, {config.num_layers} layers, d_model"
    f" {config.d_model}, vocabulary {config.vocab_size}"
  )
