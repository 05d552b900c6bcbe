"""A tiny experiment, and ways to run it, for the tests of training."""

import copy
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax

from memcomp import config as config_lib
from memcomp.training import step

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]

CONFIG_FILE = """
import sys
sys.path.insert(0, {tests!r})
import training_cases

def get_config(arg=""):
  return training_cases.tiny({data!r})
"""
# The model of `leaky`, compiled in a second.
LEAKY = """
import leaky
from memcomp.models import decoder
decoder.Decoder = leaky.Decoder
"""


def tiny(source: str = "stdlib", **training) -> config_lib.Config:
  """One layer of width 32; `training` sets fields of TrainingConfig."""
  config = config_lib.Config(name="tiny")
  model = config.model
  model.d_model, model.num_layers, model.mlp_dim = 32, 1, 32
  mixer = model.mixers["memory"]
  mixer.heads, mixer.key_dim, mixer.value_dim = 2, 8, 8
  mixer.num_slots, mixer.chunk_size, mixer.convolution_width = 4, 8, 0
  config.data.source = source
  config.data.sequence_length = 16
  config.data.prefetch = 1
  config.optimizer.warmup_steps = 2
  config.training.steps = 8
  config.training.batch_size = 4
  config.training.log_every = 1
  config.training.checkpoint_every = 3
  config.evaluation.run_after_training = False
  for name, value in training.items():
    setattr(config.training, name, value)
  return config


def write_text(folder: pathlib.Path) -> str:
  """Writes documents of different lengths; returns the folder as a source."""
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(40):
    words = [f"word {number * i % 17} of {i}\n" for i in range(5 + number)]
    (folder / f"{number}.txt").write_text("".join(words))
  return str(folder)


def write_config(folder: pathlib.Path, more: str = "") -> pathlib.Path:
  """Writes a config file of `tiny` over `write_text`'s documents.

  Args:
    folder: for it.
    more: Python for its end, such as `LEAKY`.
  """
  path = folder / "tiny.py"
  text = CONFIG_FILE.format(tests=str(HERE), data=write_text(folder / "text"))
  path.write_text(text + more)
  return path


def environment(**extra: str) -> dict[str, str]:
  """The environment of a program under test."""
  paths = [str(ROOT), str(ROOT / "kernels")]
  result = os.environ | {
    "PYTHONPATH": os.pathsep.join(paths),
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  result.pop("XLA_FLAGS", None)
  return result | extra


def start(
  config: pathlib.Path,
  workdir: pathlib.Path,
  *flags: str,
  root: pathlib.Path = ROOT,
  cwd: pathlib.Path | None = None,
  **env: str,
):
  """Starts train.py of `root` in `cwd`; its output is read as text from the process."""
  command = [sys.executable, root / "train.py", f"--config={config}"]
  return subprocess.Popen(
    [*command, f"--workdir={workdir}", *flags],
    cwd=cwd,
    env=environment(**env),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def train(config: pathlib.Path, workdir: pathlib.Path, *flags: str, **env: str):
  """Runs train.py to its end: (exit code, stdout, stderr)."""
  with start(config, workdir, *flags, **env) as process:
    out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def half_saves(workdir: pathlib.Path) -> list[pathlib.Path]:
  """Checkpoints that are being written, or were when the writer died."""
  return list((workdir / "checkpoints").glob("*tmp*"))


def stop_in_a_save(process: subprocess.Popen, workdir: pathlib.Path):
  """Stops (SIGSTOP) a process in the midst of a save, unless it ends first."""
  while process.poll() is None:
    if not half_saves(workdir):
      continue
    process.send_signal(signal.SIGSTOP)
    # Look again while nothing moves: the save may just have ended.
    if half_saves(workdir):
      return
    process.send_signal(signal.SIGCONT)


def curve(workdir: pathlib.Path) -> list[dict]:
  """metrics.jsonl without what a clock measured."""
  clocks = ("seconds_per_step", "tokens_per_second", "model_tflops_per_second")
  records = []
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    records.append(
      {k: v for k, v in record.items() if k not in (*clocks, "mfu")}
    )
  return records


def set_field(config, path: str, value) -> None:
  """Sets a field of a config by its path, such as "model.d_model"."""
  *groups, name = path.split(".")
  for group in groups:
    config = (
      config[group] if isinstance(config, dict) else getattr(config, group)
    )
  setattr(config, name, value)


STEPS = {}
"""Steps by config; `conftest` empties it after each test."""


def train_step(config: config_lib.Config):
  """Returns the step of a config, made once a test."""
  key = repr(config)
  if key not in STEPS:
    STEPS[key] = jax.jit(step.make_train_step(copy.deepcopy(config)))
  return STEPS[key]
