"""Trains the experiment of a config file, or resumes it.

  memcomp train --config=quickstart
  memcomp train --config=quickstart --config.training.steps=1000
  memcomp train --config=compare --each=trellis,lattice --seeds=3
  memcomp train --config=lm:trellis-125m --compile_only --config.mesh.fsdp=16
  memcomp train --config=my/experiment.py
  memcomp train --config=run:runs/a --init_from=runs/a --workdir=runs/b \
    --config.data.sequence_length=8192

In a clone, `python train.py` is the same program. The same command again
resumes from the newest checkpoint, or repeats the evaluation of a finished run.
--each trains many experiments, one after another, in folders WORKDIR/NAME-SEED,
and skips finished ones. --compile_only compiles the training step for TPUs that
need not be attached, and reports memory, flops, collectives and kernels.
--init_from begins a new run with the parameters of another one, whatever its
length, data and optimizer. Exit codes: 0 finished, 2 the input needs a fix, 3
compiled but too large for the device, 42 stopped by Ctrl-C or SIGTERM and saved
(the same command resumes), 43 diverged, 44 another process died, 45 hung (see
training.watchdog_seconds), 130 aborted.
"""

import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import flags
from ml_collections import config_flags

from memcomp import cli, errors, limits, paths

_CONFIG = config_flags.DEFINE_config_file(
  "config",
  help_string="Config name or file; --config.FIELD=VALUE overrides any field.",
  lock_config=True,
)
_WORKDIR = cli.DEFINE_path(
  "workdir",
  None,
  "Folder of the run, or of the runs of --each. Default: runs/<name of the "
  "config>, or of its file.",
)
_CHECKPOINTS = cli.DEFINE_path(
  "checkpoints",
  "",
  "Folder of the checkpoints, also gs://BUCKET/FOLDER. Default: the workdir.",
)
_INIT_FROM = cli.DEFINE_path(
  "init_from",
  None,
  "Run, export or Hugging Face checkpoint whose parameters a new run begins "
  "with, as --config.training.init_from.",
)
_KEEP_OPTIMIZER = flags.DEFINE_bool(
  "keep_optimizer",
  False,
  "With --init_from, a run of the same optimizer.name: take its moments too.",
)
_INIT_PARTIALLY = flags.DEFINE_bool(
  "init_partially",
  False,
  "With --init_from: take the arrays that fit; the others start fresh.",
)
_EACH = flags.DEFINE_string(
  "each",
  None,
  "Names that the config takes (CONFIG:NAME), comma-separated, or 'all'.",
)
_SEEDS = flags.DEFINE_integer(
  "seeds",
  1,
  "With --each: runs of each name, with seeds 0, 1, ...",
  1,
  limits.SIDE_BY_SIDE,
)
_COMPILE_ONLY = flags.DEFINE_bool(
  "compile_only",
  False,
  "Compile the step for --topology and report, instead of training; needs the "
  "extra aot. Writes WORKDIR/compile_only/TOPOLOGY.json.",
)
_TOPOLOGY = flags.DEFINE_string(
  "topology", "v5e:16x16", "With --compile_only: TPUs, for example v5p:4x4x4."
)
_SLICES = flags.DEFINE_integer(
  "slices", 1, "With --compile_only: slices of --topology, joined by DCN.", 1
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed",
  False,
  "Join the processes of a pod slice, which JAX finds (Cloud TPU, Slurm, GKE): "
  "start the same command on every host.",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of process 0, if JAX cannot find it."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.", 1)
_PROCESS = flags.DEFINE_integer("process", None, "This process, from 0.", 0)
_HEARTBEAT = flags.DEFINE_integer(
  "heartbeat_seconds",
  60,
  "A process without a heartbeat for this long is dead and ends the others.",
  1,
  limits.SECONDS,
)
_ONLY_WITH = {
  "seeds": ("each",),
  "keep_optimizer": ("init_from",),
  "init_partially": ("init_from",),
  "topology": ("compile_only",),
  "slices": ("compile_only",),
  "heartbeat_seconds": ("coordinator", "distributed"),
}
"""Flags that have no effect without another flag."""
_NOT_COMPILING = (
  "checkpoints",
  "init_from",
  "init_partially",
  "keep_optimizer",
  "distributed",
  "coordinator",
  "processes",
  "process",
)
"""Flags that --compile_only would ignore."""


def main() -> NoReturn:
  """Runs the command line; exits."""
  cli.main(program, usage=__doc__, interrupted=errors.EXIT_RESUMABLE)


def program() -> int:
  """Runs the experiments that the flags describe; returns an exit code."""
  config = _with_start(cli.require("config"))
  for name in _NOT_COMPILING if _COMPILE_ONLY.value else ():
    if flags.FLAGS[name].present:
      raise errors.UserError(
        f"--{name} means nothing with --compile_only: one process compiles, and"
        " it reads and saves no checkpoint; leave it out"
      )
  for name, others in _ONLY_WITH.items():
    if flags.FLAGS[name].present and not any(
      flags.FLAGS[other].value for other in others
    ):
      raise errors.UserError(
        f"--{name} means nothing without --{' or --'.join(others)}; add that,"
        " or leave it out"
      )
  if _EACH.value is not None:
    if _CHECKPOINTS.value:
      raise errors.UserError("--checkpoints is of one run; leave out --each")
    return _train_each(_EACH.value)
  workdir = _WORKDIR.value or f"runs/{config.name}"
  if _COMPILE_ONLY.value:
    return _compile_only(config, workdir)
  from memcomp.training import processes

  processes.join(
    distributed=_DISTRIBUTED.value,
    coordinator=_COORDINATOR.value,
    count=_PROCESSES.value,
    index=_PROCESS.value,
    heartbeat_seconds=_HEARTBEAT.value,
  )
  from memcomp.training import run

  return run.run(config, workdir, _CHECKPOINTS.value)


def _with_start(config):
  """Returns a config with the fields that --init_from sets."""
  if _INIT_FROM.value == "":
    raise errors.UserError(
      "--init_from is empty; give a checkpoint, or leave it out"
    )
  if _INIT_FROM.value is not None:
    # Set all: the config may belong to a run that itself began from another.
    config.training.init_from = _INIT_FROM.value
    config.training.keep_optimizer = _KEEP_OPTIMIZER.value
    config.training.init_partially = _INIT_PARTIALLY.value
  return config


def _config_of(arguments: Sequence[str]):
  """Returns the config that the flags of one run describe."""
  argv = ["memcomp train", *arguments]
  values = flags.FlagValues()
  values.set_gnu_getopt(True)  # values of other flags may stand in between
  config_flags.DEFINE_config_file(
    "config", flag_values=values, lock_config=True, sys_argv=argv
  )
  values(argv, known_only=True)
  return _with_start(values["config"].value)


def _compile_only(config, workdir: str) -> int:
  import jax

  paths.check_local("workdir", workdir)
  # The devices are only described, so no accelerator must start.
  jax.config.update("jax_platforms", "cpu")
  from memcomp.compiling import compile_only

  return compile_only.run(config, _TOPOLOGY.value, workdir, _SLICES.value)


def _train_each(each: str) -> int:
  from memcomp.training import sweep

  paths.check_local("workdir", _WORKDIR.value or "")
  whole = config_flags.get_config_filename(flags.FLAGS["config"])
  path, colon, _ = whole.partition(":")
  if colon:
    raise errors.UserError(
      f"--config={whole} names one experiment and --each others; leave one out"
    )
  return sweep.run(
    sweep.started_by(),
    sys.argv[1:],
    config=path,
    names=sweep.choose(each, runpy.run_path(path), path),
    seeds=_SEEDS.value,
    workdir=pathlib.Path(_WORKDIR.value or f"runs/{pathlib.Path(path).stem}"),
    config_of=_config_of,
  )


if __name__ == "__main__":
  main()
