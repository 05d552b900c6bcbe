"""Rules that map logical axes to mesh axes, and the trainer's mesh."""

from memcomp.sharding.axes import (
  NAMES,
  NONE,
  Rules,
  axes_of,
  rules,
  rules_of_types,
  use,
)
from memcomp.sharding.gathers import gathered, per_shard
from memcomp.sharding.mesh import (
  AXES,
  RULES,
  batch_sharding,
  check_divides,
  make_mesh,
  narrow_shards,
  one_device,
  rows_of_process,
  time_of_process,
  widest_fsdp,
)

__all__ = [
  "AXES",
  "NAMES",
  "NONE",
  "RULES",
  "Rules",
  "axes_of",
  "batch_sharding",
  "check_divides",
  "gathered",
  "make_mesh",
  "narrow_shards",
  "one_device",
  "per_shard",
  "rows_of_process",
  "rules",
  "rules_of_types",
  "time_of_process",
  "use",
  "widest_fsdp",
]
