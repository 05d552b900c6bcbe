"""Mixers with short convolutions on their projections."""

from typing import Any, ClassVar, NamedTuple

import jax

from memcomp.layers import base, short_convolution


class TapsState(NamedTuple):
  """State of a mixer with short convolutions.

  Attributes:
    query_taps: last inputs of the query convolution; None without one.
    key_taps: last inputs of the key convolution; None without one.
    value_taps: last inputs of the value convolution; None without one.
    memory: the op's state.
  """

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  memory: Any


class ConvolvedMixer(base.Mixer):
  """A mixer with `NAME_convolution` for each NAME in `convolved_names`.

  A convolution may be None. The state has a field `NAME_taps` for each.
  """

  convolved_names: ClassVar[tuple[str, ...]] = ("query", "key", "value")

  def fresh_state(self, batch: int, length: int | None = None) -> Any:
    """The state before the first token, with an empty memory."""
    del length
    return TapsState(**self.fresh_taps(batch), memory=self.init_memory(batch))

  def fresh_taps(self, batch: int) -> dict[str, Any]:
    """Initial taps by state field."""
    return {
      f"{name}_taps": short_convolution.init_taps(
        getattr(self, f"{name}_convolution"), batch
      )
      for name in self.convolved_names
    }

  def convolved(
    self, state: Any, call: base.Call, *projected: jax.Array
  ) -> tuple[list[jax.Array], Any]:
    """Applies all convolutions; returns their results and the new state."""
    results, new_taps = [], {}
    for name, y in zip(self.convolved_names, projected, strict=True):
      convolution = getattr(self, f"{name}_convolution")
      taps = getattr(state, f"{name}_taps")
      if convolution is not None and taps is not None:
        y, taps = convolution(
          y,
          taps,
          segment_ids=call.segment_ids,
          segment_id=state.memory.segment_id,
          rules=self.rules,
        )
      results.append(y)
      new_taps[f"{name}_taps"] = taps
    return results, state._replace(**new_taps)
