"""A stand-in for `memcomp.models.decoder.Decoder`: a leaky mean per layer.

The same contract (state in and out, resets at new segments, learned initial
memory, metadata of parameters), a twentieth of Trellis's program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class State(NamedTuple):
  segment_id: jax.Array
  memory: jax.Array

  def of_segment(self, segment_id):
    return self._replace(segment_id=segment_id)


class Decoder(nnx.Module):
  def __init__(self, config, *, rngs, rules=None):
    del rules  # Memories are short enough to lie anywhere.
    width, self.layers_ = config.d_model, config.num_layers
    draw = jax.nn.initializers.normal(0.2)

    def param(shape, names, decay=True):
      return nnx.Param(
        draw(rngs.params(), shape), axes=names, weight_decay=decay
      )

    stack = self.layers_
    self.embedding = param((config.vocab_size, width), ("vocab", "embed"))
    self.write = param((stack, width, width), ("embed", "mlp"))
    self.read = param((stack, width, width), ("mlp", "embed"))
    self.start = param((stack, width), (None,), decay=False)

  def init_state(self, batch, length=None):
    start = self.start[...][:, None]
    shape = (self.layers_, batch, start.shape[-1])
    return State(jnp.zeros(batch, jnp.int32), jnp.broadcast_to(start, shape))

  def hidden(self, tokens, **options):
    return self.with_stats(tokens, **options)[:2]

  def with_stats(self, tokens, *, state=None, segment_ids=None, table=None):
    del table  # The gradient comes to the parameter either way.
    if state is None:
      state = self.init_state(tokens.shape[0])
    if segment_ids is None:
      segment_ids = jnp.ones_like(tokens)
    before = jnp.concatenate(
      [state.segment_id[:, None], segment_ids[:, :-1]], axis=1
    )
    new = (segment_ids != before) & (before != 0)
    x = self.embedding[...][tokens]

    def layer(x, parts):
      write, read, start, memory = parts

      def token(memory, inputs):
        value, new = inputs
        memory = 0.9 * jnp.where(new[:, None], start, memory) + 0.1 * value
        return memory, memory

      inputs = ((x @ write).swapaxes(0, 1), new.swapaxes(0, 1))
      memory, out = jax.lax.scan(token, memory, inputs)
      return x + jnp.tanh(out.swapaxes(0, 1)) @ read, memory

    parts = (self.write[...], self.read[...], self.start[...], state.memory)
    x, memory = jax.lax.scan(layer, x, parts)
    return x, State(segment_ids[:, -1], memory), None

  def tables(self):
    return self.embedding[...], self.embedding[...]

  def logits(self, hidden, table=None):
    table = self.embedding[...] if table is None else table
    return (hidden @ table.T).astype(jnp.float32)

  def memory_norms(self, state):
    return jnp.sqrt(jnp.mean(state.memory**2, axis=(1, 2)))
