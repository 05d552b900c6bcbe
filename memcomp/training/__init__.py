"""Training: `run.run(config, workdir)` and its parts.

`validate` checks the config before anything is built. `state` and `step` are
pure functions, also for compile-only runs. `loop` handles signals, files and
clocks. `checkpoint` and `memcomp.runs` handle the files on disk.
"""

from memcomp import lazy

__all__ = [
  "checkpoint",
  "compare",
  "feed",
  "loss",
  "metrics",
  "optimizer",
  "run",
  "state",
  "step",
  "sweep",
  "validate",
]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
