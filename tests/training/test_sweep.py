"""Many runs of one config file."""

import signal
import subprocess
import sys

import pytest
import rotation
import training_cases
from absl import flags

from memcomp import config as config_lib
from memcomp import errors
from memcomp.commands import train
from memcomp.training import sweep

# Says what it was given, leaves what a finished run leaves, and ends as asked.
PROGRAM = """
import json, os, pathlib, sys
flags = dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])
folder = pathlib.Path(flags["workdir"])
(folder / "eval").mkdir(parents=True, exist_ok=True)
with open(folder / "flags", "a") as log:
  print(*sys.argv[1:], file=log)
code = int(flags.get("code_" + folder.name, 0))
if code < 0:
  os.kill(os.getpid(), -code)
step = 3 if code == 0 else 1
(folder / "eval" / "results.json").write_text(json.dumps({"step": step}))
sys.exit(code)
"""


@pytest.fixture
def program(tmp_path):
  path = tmp_path / "program.py"
  path.write_text(PROGRAM)
  return str(path)


def run(program, tmp_path, *flags, names=("a", "b"), seeds=2, steps=None):
  return sweep.run(
    [sys.executable, program],
    flags,
    config="some/config.py",
    names=names,
    seeds=seeds,
    workdir=tmp_path / "runs",
    config_of=lambda given: training_cases.tiny(
      steps=(steps or {}).get(given[0].rpartition(":")[2], 3)
    ),
  )


def flags_of(tmp_path, name):
  return (tmp_path / "runs" / name / "flags").read_text().splitlines()


def test_each_run_has_its_own_flags(program, tmp_path, capsys):
  given = ("--config=some/config.py", "--each", "a,b", "--seeds=2", "--x=1")
  assert run(program, tmp_path, *given, "--workdir", "elsewhere") == 0
  folder = tmp_path / "runs" / "b-1"
  assert flags_of(tmp_path, "b-1") == [
    f"--config=some/config.py:b --config.seed=1 --workdir={folder} --x=1"
  ]
  order = [
    line.split("/")[-1]
    for line in capsys.readouterr().out.splitlines()
    if line.startswith("[")
  ]
  assert order == ["a-0", "b-0", "a-1", "b-1"]


def test_what_is_done_is_left_out(program, tmp_path, capsys):
  run(program, tmp_path)
  assert run(program, tmp_path) == 0
  assert capsys.readouterr().out.count("done before") == 4
  assert len(flags_of(tmp_path, "a-0")) == 1


def test_each_is_done_at_its_own_last_step(program, tmp_path, capsys):
  run(program, tmp_path, seeds=1, steps={"a": 2, "b": 4})
  run(program, tmp_path, seeds=1, steps={"a": 2, "b": 4})
  assert capsys.readouterr().out.count("done before") == 1
  assert len(flags_of(tmp_path, "a-0")) == 1
  assert len(flags_of(tmp_path, "b-0")) == 2  # it was evaluated at step 3


def test_what_is_done_with_another_config_is_refused(program, tmp_path, capsys):
  run(program, tmp_path)
  config = training_cases.tiny(steps=3)
  path = tmp_path / "runs" / "b-1" / "config.json"
  path.write_text(config_lib.to_json(config))
  assert run(program, tmp_path) == 0
  config.optimizer.learning_rate = 0.5
  path.write_text(config_lib.to_json(config))
  with pytest.raises(errors.UserError, match=r"b-1 .*learning_rate was 0\.5"):
    run(program, tmp_path)
  assert len(flags_of(tmp_path, "a-0")) == 1


# ml_collections loads the file in a way that Python will drop.
@pytest.mark.filterwarnings("ignore:the load_module")
def test_the_config_of_a_run_is_read_from_its_flags(tmp_path):
  flags.FLAGS.mark_as_parsed()
  path = training_cases.write_config(tmp_path)
  given = ("--each", "a,b", "--config.optimizer.b1", "0.5", "--x=1")
  found = train._config_of([f"--config={path}:a", "--config.seed=4", *given])
  assert (found.name, found.seed, found.optimizer.b1) == ("tiny", 4, 0.5)


def test_one_that_fails_does_not_stop_the_rest(program, tmp_path, capfd):
  assert run(program, tmp_path, "--code_a-0=43") == 43
  assert (tmp_path / "runs" / "b-1").exists()
  assert "a-0 ended with exit code 43" in capfd.readouterr().err
  assert run(program, tmp_path) == 0
  assert len(flags_of(tmp_path, "a-0")) == 2


def test_one_that_is_killed_does_not_stop_the_rest(program, tmp_path, capfd):
  assert run(program, tmp_path, "--code_a-0=-9") == 128 + 9
  assert (tmp_path / "runs" / "b-1").exists()
  told = "a-0 ended with exit code 137 (signal 9)"
  assert told in capfd.readouterr().err


@pytest.mark.parametrize(
  ("code", "expected"),
  [
    (errors.EXIT_RESUMABLE, errors.EXIT_RESUMABLE),
    (errors.EXIT_BAD_INPUT, errors.EXIT_BAD_INPUT),
    (-2, 130),
    (-15, 143),
  ],
)
def test_one_that_is_stopped_stops_the_rest(
  code, expected, program, tmp_path, capfd
):
  """Those that failed before are named all the same."""
  flags = f"--code_a-0={errors.EXIT_DIVERGED}", f"--code_b-0={code}"
  assert run(program, tmp_path, *flags) == expected
  assert not (tmp_path / "runs" / "a-1").exists()
  assert "a-0 ended with exit code 43" in capfd.readouterr().err


def test_a_seed_beside_the_seeds_is_refused(program, tmp_path):
  with pytest.raises(errors.UserError, match="--seeds"):
    run(program, tmp_path, "--config.seed=4")


def test_flags_in_a_file_are_refused(program, tmp_path):
  """The runs would read `--each` in it again."""
  with pytest.raises(errors.UserError, match="--flagfile: beside --each"):
    run(program, tmp_path, "--flagfile=flags.txt")


def test_names():
  def get_config(name):
    if name not in ("a", "b", "c"):
      raise ValueError(f"{name!r} is none of: a, b, c")

  file = {"NAMES": ("a", "b"), "get_config": get_config}
  assert sweep.choose("all", file, "f.py") == ["a", "b"]
  assert sweep.choose("b,c", file, "f.py") == ["b", "c"]
  for names, given, said in (
    ("a,d", file, "f.py does not take 'd': 'd' is none of: a, b, c"),
    (",", file, "empty"),
    ("all", {"get_config": get_config}, "f.py lists no NAMES"),
    ("a", {"get_config": lambda: None}, "does not take 'a'"),
    ("a", {"get_config": {}.__getitem__}, "does not take 'a': KeyError: 'a'"),
  ):
    with pytest.raises(errors.UserError, match=said):
      sweep.choose(names, given, "f.py")


@pytest.mark.parametrize(
  ("number", "code"),
  rotation.cases(
    [(signal.SIGTERM, 42), (signal.SIGHUP, 0), (signal.SIGINT, 1)],
    [(signal.SIGHUP, 0)],
  ),
)
def test_a_signal_reaches_the_run(tmp_path, number, code):
  """A signal to the sweep alone: the run may save, and no other begins.

  One that was done before it heard ends with 0, and one may fail.
  """
  child = tmp_path / "child.py"
  child.write_text(
    "import signal, sys, time\n"
    "for number in signal.SIGTERM, signal.SIGHUP:\n"
    f"  signal.signal(number, lambda *_: sys.exit({code}))\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)\n"
  )
  parent = (
    "import pathlib, signal, sys\n"
    "from memcomp.training import sweep\n"
    # Under nohup it would be ignored.
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    "sweep._LATER_SECONDS = 0.5\n"
    f"sys.exit(sweep.run([sys.executable, {str(child)!r}], [], config='c', names=['a', 'b'],"
    f" seeds=1, workdir=pathlib.Path({str(tmp_path)!r}), config_of=None))\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", parent],
    env=training_cases.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  while process.stdout.readline() != "ready\n":
    pass
  process.send_signal(number)
  output, said = process.communicate(timeout=60)
  assert process.returncode == (code or 128 + number)
  assert "the same command goes on" in said
  assert "[2/2]" not in output


@pytest.mark.parametrize(
  "started",
  [["-X", "dev", "train.py"], ["-m", "memcomp", "train"], ["memcomp", "train"]],
)
def test_a_run_is_started_as_the_sweep_was(started, monkeypatch):
  flags = ["--each=all", "--x", "1"]
  monkeypatch.setattr(sys, "orig_argv", ["python", *started, *flags])
  monkeypatch.setattr(sys, "argv", ["memcomp train", *flags])
  assert sweep.started_by() == [sys.executable, *started]


@pytest.mark.slow
def test_the_program(tmp_path):
  config = training_cases.write_config(tmp_path)
  head = 'def get_config(arg=""):\n'
  refusal = "  if arg == 'z': raise ValueError('none of: x, y')\n"
  text = config.read_text().replace(head, head + refusal)
  config.write_text(text + "\nNAMES = ('x', 'y')\n")
  flags = ("--each=all", "--config.training.steps=3")
  runs = tmp_path / "runs"
  code, out, err = training_cases.train(config, runs, *flags)
  assert code == 0, err
  assert "[1/2]" in out and (runs / "y-0" / "checkpoints" / "3").exists()
  code, _, err = training_cases.train(config, runs, "--each=z")
  assert code == errors.EXIT_BAD_INPUT
  assert len(err.splitlines()) == 1 and "'z': none of: x, y" in err
