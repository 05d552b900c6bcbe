"""Rules that map logical axes to mesh axes, and the trainer's mesh."""

from memcomp.sharding.axes import (
  NAMES,
  NONE,
  Rules,
  axes_of,
  of_types,
  rules,
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
  "of_types",
  "one_device",
  "per_shard",
  "rows_of_process",
  "rules",
  "time_of_process",
  "use",
  "widest_fsdp",
]
