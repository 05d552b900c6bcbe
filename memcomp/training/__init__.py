"""Training: `run.run(config, workdir)` and the pieces it is made of.

`validate` reads the config before anything is built; `state` and `step` are
the pure part (also what a compile-only run lowers); `loop` is the part with
signals, files and clocks; `checkpoint` and `memcomp.runs` are what stays on
disk.
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
