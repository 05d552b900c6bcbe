"""Trains the experiment of a config file, or goes on training it.

  python train.py --config=configs/quickstart.py
  python train.py --config=configs/quickstart.py --config.training.steps=1000

The same command again goes on from the newest checkpoint, and repeats the
evaluation of a run that has finished. Exit codes: 0 finished, 2 the input needs
a fix, 42 stopped by Ctrl-C or SIGTERM and saved (the same command goes on), 43
diverged, 130 aborted.
"""

from absl import flags
from ml_collections import config_flags

from memcomp import cli

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  help_string="Config file; any field is overridden with --config.FIELD=VALUE.",
  lock_config=True,
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder of the run. Default: runs/<name of the config>."
)


def program() -> int:
  """Runs the experiment that the flags describe; returns an exit code."""
  from memcomp.training import run

  config = cli.require("config")
  return run.run(config, _WORKDIR.value or f"runs/{config.name}")


if __name__ == "__main__":
  cli.main(program, usage=__doc__)
