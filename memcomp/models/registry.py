"""Mixers by name: the one list that configs, presets and docs go by."""

from typing import Any

from memcomp.layers import trellis

MIXERS: dict[str, tuple[type, type]] = {
  "trellis": (trellis.TrellisConfig, trellis.Trellis),
}
"""name -> (configuration, module). All modules share one signature:

  Module(config, d_model, std=, out_std=, rngs=)
  init_state(batch) -> state
  module(x, state, segment_ids=, positions=) -> (y, state)
  step(x, state) -> (y, state)
  memories(state) -> arrays
"""


def name_of(config: Any) -> str:
  """The name of the mixer that `config` configures."""
  for name, (config_type, _) in MIXERS.items():
    if isinstance(config, config_type):
      return name
  raise ValueError(f"{type(config).__name__} configures no known mixer")


def module_of(config: Any) -> type:
  """The module that `config` configures."""
  return MIXERS[name_of(config)][1]
