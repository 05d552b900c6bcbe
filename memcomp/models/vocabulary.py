"""Both ends of the language model: tokens to vectors, vectors to logits."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, norm, short_convolution
from memcomp.models import decoder_config, decoder_state
from memcomp_kernels import contract


class Vocabulary(nnx.Module):
  """Embedding, head, and the norms and convolution beside them.

  Args:
    config: the model's config.
    rngs: random streams.
    rules: map logical axes to mesh axes; see `memcomp.sharding.rules`.
  """

  def __init__(
    self,
    config: decoder_config.DecoderConfig,
    *,
    rngs: nnx.Rngs,
    rules: sharding.Rules,
  ):
    self.rules = rules
    self.dtype = config.dtype
    table = (config.vocab_size, config.d_model)
    self.embedding = linear.normal_param(
      rngs, table, ("vocab", "embed"), std=config.embedding_std
    )
    self.head = nnx.data(None)
    if not config.tied_embeddings:
      self.head = linear.normal_param(
        rngs,
        table,
        ("vocab", "embed"),
        std=config.head_std or config.init_std,
        init="orthogonal" if config.head_std else "normal",
      )
    self.convolution = nnx.data(None)
    if config.embedding_convolution:
      self.convolution = short_convolution.ShortConvolution(
        config.d_model, config.embedding_convolution, rngs=rngs
      )
    new_norm = functools.partial(norm.NORMS[config.norm], eps=config.norm_eps)
    self.embedding_norm = nnx.data(
      new_norm(config.d_model) if config.embedding_norm else None
    )
    self.norm = new_norm(config.d_model)

  @contract.default_promotion()
  def embed(
    self,
    tokens: jax.Array,
    state: decoder_state.DecoderState,
    segment_ids: jax.Array | None = None,
    table: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array | None]:
    """Maps tokens `[batch, time]` to the first block's input, and new taps."""
    if table is None:
      table = self.embedding[...][None]

    def look_up(table, tokens):
      return jnp.take(table, tokens, axis=0).astype(self.dtype)

    x = sharding.per_shard(look_up, table, tokens, self.rules)
    taps = state.taps
    if self.convolution is not None and taps is not None:
      x, taps = self.convolution(
        x,
        taps,
        segment_ids=segment_ids,
        segment_id=state.segment_id,
        rules=self.rules,
      )
    if self.embedding_norm is not None:
      x = self.embedding_norm(x)
    return self.rules.constrain(x, "batch", "time", "act_embed"), taps

  def tables(self) -> tuple[jax.Array, jax.Array]:
    """Embedding and head tables for a training step, `[shards, vocab, d]`.

    Tied tables are one array. Each table is gathered once, and the gradients of
    all its uses are summed once: see `sharding.gathered`.
    """

    def gathered(table):
      return sharding.gathered(table[...], self.dtype, self.rules)

    embedding = gathered(self.embedding)
    if self.head is None:
      return embedding, embedding
    return embedding, gathered(self.head)

  @contract.default_promotion()
  def logits(
    self, hidden: jax.Array, table: jax.Array | None = None
  ) -> jax.Array:
    """Maps hidden `[..., d_model]` to float32 logits `[..., vocab]`.

    Args:
      hidden: normalized output of the last block.
      table: head table from `tables`; by default the parameter itself.
    """
    if table is None:
      head = self.embedding if self.head is None else self.head
      table = self.rules.constrain(head[...], "vocab", None)[None]

    def project(table, hidden):
      return jnp.einsum(
        "...d,vd->...v",
        hidden,
        table.astype(hidden.dtype),
        preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32),
      )

    return sharding.per_shard(project, table, hidden, self.rules)
