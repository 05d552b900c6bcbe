"""What the memories of a model are given, for looking at numerics on real data.

Text repeats its keys and decays unevenly; random inputs do neither.
"""

from typing import Any

import jax

from memcomp.layers import mixer
from memcomp.models import decoder


def memory_inputs(
  model: decoder.Decoder, tokens: jax.Array
) -> list[tuple[Any, Any]]:
  """Runs a model layer by layer on fresh states.

  Args:
    model: whose mixers have `memory_inputs`: Trellis, Lattice.
    tokens: int `[batch, time]`.

  Returns:
    For each layer the `State` before the first token and the `Inputs`
    `[batch, time, heads, ...]` that its memory's `chunk` is called with.
  """
  state = model.init_state(*tokens.shape)
  x, _ = model.embed(tokens, state)
  found = []
  for depth in range(model.num_layers):
    block, block_state = model.layer(depth, state)
    inputs, _ = block.mixer.memory_inputs(
      block.mixer_norm(x), block_state.mixer, None
    )
    found.append((block_state.mixer.memory, inputs))
    x, _ = block(x, block_state, mixer.Context(), state.segment_id)
  return found
