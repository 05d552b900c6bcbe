"""Mistakes on the command line: one line, exit code 2, nothing written."""

import json
import re
import subprocess
import sys

import forks
import pytest
import training_cases

CONFIGS = {
  "raises.py": "def get_config():\n  return {}['a']\n",
  "syntax.py": "def get_config(:\n",
  "empty.py": "x = 1\n",
  "typo.py": """
import training_cases
def get_config():
  config = training_cases.tiny()
  config.training.stepz = 3
  return config
""",
  "type.py": """
import training_cases
def get_config():
  config = training_cases.tiny()
  config.training.steps = "many"
  return config
""",
  "none.py": "def get_config():\n  pass\n",
  "model.py": """
import training_cases
def get_config():
  return training_cases.tiny().model
""",
  "numpy_types.py": """
import numpy as np
import training_cases
def get_config():
  config = training_cases.tiny()
  config.model.d_model = 64 / 4
  config.training.batch_size = np.array(4)
  return config
""",
}

C = "--config=tiny.py"
LONG = "a" * 300
BAD = {
  "unknown field": ([C, "--config.training.stepz=3"], "training.steps"),
  "nothing to begin from": ([C, "--init_from="], "--init_from is empty"),
  "unknown group": ([C, "--config.trainin.steps=3"], "training.steps"),
  "field elsewhere": ([C, "--config.steps=3"], "training.steps"),
  "field of the mixer": (
    [C, "--config.model.num_slots=3"],
    "mixers.memory.num_slots",
  ),
  "mixer's name": (
    [C, "--config.model.mixers.memry.num_slots=3"],
    "did you mean model.mixers.memory.num_slots",
  ),
  "mixer's field": (
    [C, "--config.model.mixers.memory.num_slotz=3"],
    "did you mean model.mixers.memory.num_slots",
  ),
  "type in a mixer": (
    [C, "--config.model.mixers.memory.num_slots=many"],
    "a whole number",
  ),
  "a mixer": ([C, "--config.model.mixers.memory=3"], "group of fields"),
  "old name of the mixer": (
    [C, "--config.model.mixer.num_slots=many"],
    "a whole number",
  ),
  "no second mixer": (
    [C, "--config.model.mixer_b.heads=2"],
    "did you mean model.mixers.memory.heads",
  ),
  "pattern": (
    [C, "--config.model.pattern=memory+window"],
    "no mixer 'window'; there are memory",
  ),
  "not a whole number": ([C, "--config.training.steps=1.5"], "a whole number"),
  "not a number": ([C, "--config.training.z_loss=abc"], "a number"),
  "text for a number": ([C, "--config.training.steps=abc"], "a whole number"),
  "not true or false": (
    [C, "--config.training.carry_state=maybe"],
    "true or false",
  ),
  "value apart": ([C, "--config.training.steps", "abc"], "a whole number"),
  "no value": ([C, "--config.training.steps"], "no value"),
  "below a leaf": ([C, "--config.training.steps.x=2"], "no such field"),
  "a group": ([C, "--config.training=3"], "group of fields"),
  "unknown flag": ([C, "--workdri=x"], "--workdir"),
  "unknown flag without likeness": ([C, "--zzz=1"], "--help"),
  "a word": ([C, "extra"], "extra"),
  "before the config": (["--config.seed=3", C], "put --config first"),
  "no config": ([], "--config is missing"),
  "no config but fields": (["--config.seed=3"], "add --config=FILE"),
  "missing file": (["--config=tinny.py"], "did you mean tiny.py"),
  "unknown name": (["--config=smok"], "did you mean smoke?"),
  "unknown name without likeness": (["--config=zzz:a"], "long_context, mqar"),
  "argument of a named config": (
    ["--config", "smoke:zzz"],
    "'zzz' is no mixer",
  ),
  "field of a named config": (
    ["--config", "smoke", "--config.training.stepz=3"],
    "training.steps",
  ),
  "two configs": (["--config=smoke", C], "--config is given twice"),
  "a folder": (["--config=/tmp"], "no such file"),
  "raises": (["--config=raises.py"], "raises.py:2: KeyError"),
  "syntax": (["--config=syntax.py"], "syntax.py:1: SyntaxError"),
  "no get_config": (["--config=empty.py"], "no get_config()"),
  "typo in the file": (["--config=typo.py"], "typo.py:5: AttributeError"),
  "type in the file": (["--config=type.py"], "training.steps = 'many'"),
  "None from the file": (["--config=none.py"], "returned NoneType"),
  "a model from the file": (
    ["--config=model.py", "--config.d_model=8"],
    "returned DecoderConfig; return a memcomp.config.Config",
  ),
  "numbers of other types": (["--config=numpy_types.py"], "a whole number"),
  "argument not taken": (["--config=raises.py:big"], "raises.py"),
  "out of range": ([C, "--config.training.steps=0"], "at least 1"),
  "negative": ([C, "--config.training.batch_size=-1"], "at least 1"),
  "not finite": ([C, "--config.optimizer.learning_rate=nan"], "finite"),
  "missing data": ([C, "--config.data.source=/nowhere"], "/nowhere"),
  "missing validation": (
    [
      C,
      "--config.data.validation=/nowhere",
      "--config.training.evaluate_every=0",
      "--config.evaluation.run_after_training=True",
    ],
    "/nowhere: no such file",
  ),
  "empty data": ([C, "--config.data.source=empty"], "empty"),
  "too many devices": ([C, "--config.mesh.fsdp=64"], "64 devices"),
  "batch over mesh": (
    [C, "--config.mesh.fsdp=3", "--config.training.batch_size=4"],
    "do not divide",
  ),
  "tokenizer": ([C, "--config.data.tokenizer=words"], "tokenizer"),
  "carry without stream": ([C, "--config.training.carry_state"], "stream"),
  "workdir is a file": ([C, "--workdir=tiny.py"], "is a file"),
  "workdir below a file": ([C, "--workdir=tiny.py/x"], "Not a directory"),
  "workdir too long": ([C, f"--workdir={LONG}"], "File name too long"),
  "workdir in /proc": ([C, "--workdir=/proc/x"], "/proc/x"),
  "workdir of nobody": ([C, "--workdir=~nobody-of-it/x"], "no home folder"),
  "runs in a bucket": (
    [C, "--each=a", "--workdir=gs://b/runs"],
    "--workdir=gs://b/runs: only checkpoints",
  ),
  "report in a bucket": (
    [C, "--compile_only", "--workdir=gs://b/runs"],
    "--workdir=gs://b/runs: only checkpoints",
  ),
  "checkpoints below a file": ([C, "--checkpoints=tiny.py/x"], "tiny.py/x"),
  "cache of nobody": ([C, "--compilation_cache=~nobody-of-it"], "no home"),
  "tokenizer too long": (
    [C, f"--config.data.tokenizer={LONG}"],
    f"unknown tokenizer '{LONG}'",
  ),
  "tokenizer.json too long": (
    [C, f"--config.data.tokenizer={LONG}.json"],
    "File name too long",
  ),
  "source too long": (
    [C, f"--config.data.source={LONG}"],
    "File name too long",
  ),
  "source below a file": ([C, "--config.data.source=tiny.py/x"], "tiny.py/x"),
  "source of nobody": ([C, "--config.data.source=~nobody-of-it"], "no home"),
  "config too long": ([f"--config={LONG}.py"], "File name too long"),
  "config below a file": (["--config=tiny.py/x.py"], "no such file"),
  "config of nobody": (["--config=~nobody-of-it/x.py"], "no home folder"),
  "seed below 0": ([C, "--config.seed=-1"], "[0, 2**32)"),
  "seed too large": ([C, "--config.seed=5000000000"], "[0, 2**32)"),
  "seed of the data below 0": ([C, "--config.data.seed=-1"], "[0, 2**32)"),
  "seed of the data": ([C, "--config.data.seed=5000000000"], "[0, 2**32)"),
  "steps beyond int32": ([C, "--config.training.steps=9999999999"], "or less"),
  "a number of 5,000 digits": (
    [C, f"--config.training.steps={'9' * 5000}"],
    "training.steps",
  ),
  "batch too large": (
    [C, "--config.training.batch_size=2000000000"],
    "tokens a step",
  ),
  "batch beyond int32": (
    [C, "--config.training.batch_size=99999999999"],
    "or less",
  ),
  "watchdog for ever": (
    [C, "--config.training.watchdog_seconds=1e30"],
    "0 is never",
  ),
  "prefetch": ([C, "--config.data.prefetch=2000000000"], "data.prefetch"),
  "too many seeds": ([C, "--each=a", "--seeds=99999999999"], "--seeds"),
  "heartbeats of one": (
    [C, "--heartbeat_seconds=9"],
    "without --coordinator or --distributed",
  ),
  **{
    f"--{flag} of a compilation": (
      [C, "--compile_only", f"--{flag}{value}"],
      f"--{flag} means nothing with --compile_only",
    )
    for flag, value in (
      ("processes", "=2"),
      ("checkpoints", "=x"),
      ("init_from", "=x"),
      ("init_partially", ""),
      ("keep_optimizer", ""),
    )
  },
  "one of each": (
    ["--config=tiny.py:x", "--each=a"],
    "--config=tiny.py:x names one experiment and --each others; leave one out",
  ),
  "heartbeat": (
    [C, "--heartbeat_seconds=99999999999"],
    "--heartbeat_seconds",
  ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
  folder = tmp_path_factory.mktemp("cli")
  training_cases.write_config(folder)
  (folder / "empty").mkdir()
  for name, text in CONFIGS.items():
    (folder / name).write_text(text)
  commands = {name: argv for name, (argv, _) in BAD.items()}
  commands["help"] = ["--help"]
  commands["help with config"] = [C, "--help"]
  before = {p.name for p in folder.iterdir()}
  results = forks.run(
    "memcomp.commands.train",
    folder,
    [training_cases.HERE],
    devices=8,
    commands=list(commands.values()),
  )
  found = dict(zip(commands, results, strict=True))
  found["left behind"] = {p.name for p in folder.iterdir()} - before
  return found


@pytest.mark.parametrize("name", list(BAD))
def test_a_mistake_is_one_line(results, name):
  code, out, err = results[name]
  assert (code, out) == (2, ""), err
  (line,) = err.splitlines()
  assert line.startswith("error: ")
  assert BAD[name][1] in line
  # Cause and fix stand apart.
  assert re.search(r"[;:] ", line.removeprefix("error: "))


def test_mistakes_leave_nothing_behind(results):
  assert results["left behind"] <= {"__pycache__"}


def test_help_is_readable(results):
  code, out, err = results["help"]
  assert (code, err) == (0, "")
  for part in ("--config", "--workdir", "--compilation_cache", "Exit codes"):
    assert part in out
  assert len(out.splitlines()) < 42
  code, out, _ = results["help with config"]
  assert code == 0
  assert "--config.training.steps=8" in out
  assert "--config.model.mixers.memory.phi=ln_silu" in out


@pytest.mark.slow
def test_overrides_reach_the_run(tmp_path):
  config = training_cases.write_config(tmp_path)
  code, _, err = training_cases.train(
    config,
    tmp_path / "run",
    "--config.training.steps=3",
    "--config.model.mixers.memory.phi",
    "silu",
    "--noconfig.training.tensorboard",
    "--config.optimizer.learning_rate=1",
  )
  assert (code, err) == (0, "")
  saved = json.loads((tmp_path / "run/config.json").read_text())
  assert saved["training"]["steps"] == 3
  assert saved["model"]["mixers"]["memory"]["phi"] == "silu"
  assert saved["optimizer"]["learning_rate"] == 1.0


@pytest.mark.slow
def test_the_cache_of_programs(tmp_path):
  script = (
    "from memcomp import cli; import jax, sys, os;"
    # As in a container, whose user may be any number.
    "os.environ.get('HOME') or setattr(os, 'getuid', lambda: 4_000_000_000);"
    "cli.set_compilation_cache(sys.argv[1]);"
    "print(jax.config.jax_compilation_cache_dir)"
  )

  def folder(flag, **env):
    environment = training_cases.environment(**env)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment = environment | {"XDG_CACHE_HOME": ""} | env
    return subprocess.run(
      [sys.executable, "-c", script, flag],
      env={k: v for k, v in environment.items() if v or k != "HOME"},
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  home = str(tmp_path)
  assert folder("", XDG_CACHE_HOME=home) == f"{home}/memcomp"
  assert folder("", HOME=home) == f"{home}/.cache/memcomp"
  assert folder("", HOME="") == "None"
  assert folder("off", XDG_CACHE_HOME=home) == "None"
  (tmp_path / "file").touch()
  with pytest.raises(subprocess.CalledProcessError) as error:
    folder(f"{home}/file/x")
  assert "NotADirectoryError" in error.value.stderr
  assert folder(f"{home}/own") == f"{home}/own"
  kept = folder("", JAX_COMPILATION_CACHE_DIR=f"{home}/env")
  assert kept == f"{home}/env"
