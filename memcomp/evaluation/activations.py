"""The inputs of a model's memories, to study numerics on real data.

Text repeats its keys and decays unevenly. Random inputs do neither.
"""

from typing import Any

import jax

from memcomp.layers import base
from memcomp.models import decoder


def memory_inputs(
  model: decoder.Decoder, tokens: jax.Array
) -> list[tuple[Any, Any]]:
  """Runs a model layer by layer on fresh states.

  Args:
    model: the model; each mixer's `inputs` gives the memory's inputs.
    tokens: int `[batch, time]`.

  Returns:
    For each layer, the arguments of its memory's `chunk`: the `State` before
    the first token, and the `Inputs` `[batch, time, heads, ...]`.
  """
  state = model.init_state(*tokens.shape)
  x, _ = model.embed(tokens, state)
  found = []
  for depth in range(model.num_layers):
    block, block_state = model.layer(depth, state)
    inputs, _ = block.mixer.inputs(
      block.mixer_norm(x), block_state.mixer, base.Call()
    )
    found.append((block_state.mixer.memory, inputs))
    x, _ = block(x, block_state, base.Call(), state.segment_id)
  return found
