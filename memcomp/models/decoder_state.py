"""The state of the language model."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memcomp.models import unstacked


class DecoderState(NamedTuple):
  """State of the decoder.

  Attributes:
    taps: taps of the embedding convolution, or None.
    segment_id: int32 `[batch]`, 0 before any token.
    layers: one entry per stack of blocks (`Decoder.stacks`), stacked by layer
      along axis 0, or an `unstacked.Unstacked` (see `by_layer`).
  """

  taps: jax.Array | None
  segment_id: jax.Array
  layers: tuple[Any, ...]

  def of_segment(self, segment_id: jax.Array) -> "DecoderState":
    """Returns the same memories as those of another segment.

    Tokens of that segment then go on from them; of any other, they start anew.

    Args:
      segment_id: int32 `[batch]`.
    """
    # Every memory's state has this field, wherever a mixer keeps that state.
    field = jax.tree_util.GetAttrKey("segment_id")

    def relabel(path, leaf):
      if path[-1] == field:
        return jnp.broadcast_to(segment_id, leaf.shape)
      return leaf

    return jax.tree_util.tree_map_with_path(relabel, self)

  def by_layer(self) -> "DecoderState":
    """Returns the state with unstacked layers, for a loop of `step`."""
    return self._replace(layers=tuple(map(unstacked.unstack, self.layers)))

  def stacked(self) -> "DecoderState":
    """Reverses `by_layer`."""
    return self._replace(layers=tuple(map(unstacked.stack, self.layers)))
