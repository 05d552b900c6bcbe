"""Processes of one run that were not started alike are told so, and end."""

import json
import threading
from concurrent import futures

import jax
import numpy as np
import pytest
import training_cases
import two_processes
from jax.experimental import multihost_utils

from memcomp import errors, sharding
from memcomp.training import processes, validate

SAME = {"config": '{"a": 1}', "code": "b", "training data": "c"}


def messages(monkeypatch, *blocks):
  """What each process is told: `blocks` are functions of what they note.

  Threads stand for processes; each meets all others in every exchange.
  """
  barrier = threading.Barrier(len(blocks))
  handed_in = [None] * len(blocks)
  this = threading.local()

  def process_allgather(mine):
    handed_in[this.index] = mine
    barrier.wait(timeout=60)
    found = np.stack(handed_in)
    barrier.wait(timeout=60)
    return found

  def run(index):
    this.index = index
    try:
      with processes.together("opening") as seen:
        blocks[index](seen)
    except errors.UserError as error:
      return str(error)
    return ""

  monkeypatch.setattr(processes, "is_alone", lambda: False)
  monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
  with futures.ThreadPoolExecutor(len(blocks)) as pool:
    return list(pool.map(run, range(len(blocks))))


def noting(problem="", **changes):
  def block(seen):
    seen |= SAME | {k.replace("_", " "): v for k, v in changes.items()}
    if problem:
      raise errors.UserError(problem)

  return block


def test_all_alike(monkeypatch):
  assert messages(monkeypatch, noting(), noting()) == ["", ""]


def test_of_two_the_first_is_right(monkeypatch):
  told = messages(monkeypatch, noting(), noting(training_data="other"))
  expected = (
    "of the run's 2 processes these differ from the others: process 1 in its"
    " training data; here: training data {}; give all the same"
  )
  assert told == [expected.format("c"), expected.format("other")]


def test_of_three_the_most_are_right(monkeypatch):
  longer = json.dumps({"a": 1, "b": "x" * 300})
  first = noting(config=longer, versions="older")
  other = noting(training_data="other", versions="newer")
  told = messages(monkeypatch, first, other, other)
  for line in told:
    assert "process 0 in its config (b 'xx" in line
    assert ") and versions and training data; here: " in line
    assert "x" * 250 not in line  # nobody wants to read a whole config


def test_other_code_exchanges_no_more_than_is_known_of_it(monkeypatch):
  """It may be of a version that would not answer."""
  told = messages(monkeypatch, noting(), noting(config="{}", code="newer"))
  assert all("process 1 in its config and code;" in line for line in told)


def test_two_that_differ_in_other_things(monkeypatch):
  blocks = (
    noting(),
    noting(training_data="1"),
    noting(config='{"a": 2}'),
    noting(),
  )
  for line in messages(monkeypatch, *blocks):
    assert "process 1 in its training data, process 2 in its config (" in line
    assert "(a 2, others 1); here: config {" in line


def test_a_mistake_of_one_and_a_difference_from_it(monkeypatch):
  """Whoever has one of its own tells that; it may have come before the rest."""

  def early(seen):
    seen["config"] = "bad"
    raise errors.UserError("steps = 0")

  told = messages(monkeypatch, noting(), early)
  assert told[1] == "steps = 0"
  assert "process 1 in its config" in told[0]
  told = messages(monkeypatch, noting(), noting("no text"), noting())
  assert told[1] == "no text"
  for line in (told[0], told[2]):
    assert line == "process 1 stopped while opening; see what it printed"


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ({"count": 2, "index": 1}, r"--processes=2: .*add --coordinator=HOST:PORT"),
    ({"index": 0}, r"--process=0: .*--coordinator=HOST:PORT"),
    ({"count": 1}, r"--processes=1: .*--distributed"),
    ({"coordinator": "here"}, r"--coordinator=here: write HOST:PORT"),
    ({"coordinator": "here:"}, "write HOST:PORT"),
    ({"coordinator": ":1234"}, "write HOST:PORT"),
    ({"coordinator": "a:http"}, "write HOST:PORT"),
    ({"coordinator": "a:70000"}, "write HOST:PORT"),
    ({"coordinator": ""}, "write HOST:PORT"),
    (
      {"coordinator": "a:1", "count": 2, "index": 2},
      r"--process=2: of --processes=2 the last is --process=1",
    ),
  ],
)
def test_processes_that_are_not_described(flags, message):
  with pytest.raises(errors.UserError, match=message):
    processes.join(**flags)


def test_one_process_joins_nobody(monkeypatch):
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda *_, **__: pytest.fail("joined")
  )
  processes.join()


def test_a_process_without_a_device_in_the_mesh(monkeypatch):
  """As with the usual mesh, which is one device."""
  config = training_cases.tiny()
  mesh = sharding.make_mesh(config.mesh)
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  with pytest.raises(
    errors.UserError, match=r"none of process 1, 2; set mesh\.replica=-1"
  ):
    validate.check_mesh(config, mesh)


ALIKE = ("--config.data.source=text.txt", "--config.mesh.replica=-1")
THREE = ("--config.mesh.fsdp=1", "--config.training.batch_size=3", *ALIKE)


@pytest.fixture
def folders(tmp_path):
  """Of three processes, each with the same files under the same names."""
  made = [tmp_path / name for name in "abc"]
  for folder in made:
    folder.mkdir()
    for name, count in (("text", 99), ("validation", 9)):
      (folder / f"{name}.txt").write_text("the quick brown fox " * count)
  return made


def run(config, workdir, folders, *flags, **kwargs):
  """Last lines of processes that all end with exit code 2."""
  with two_processes.running(
    config, workdir, *THREE, *flags, folders=folders, each=1, **kwargs
  ) as started:
    lines = []
    for code, _, err in two_processes.ends(started):
      assert code == 2, err
      assert "Traceback" not in err
      lines.append([x for x in err.splitlines() if x.startswith("error:")][-1])
  return lines


@pytest.mark.slow
def test_three_that_read_other_text(folders, tmp_path):
  config = training_cases.write_config(tmp_path)
  (folders[1] / "text.txt").write_text("9876543210 " * 180)
  (folders[2] / "validation.txt").write_text("0 1 2 " * 60)
  flags = (
    "--config.data.validation=validation.txt",
    "--config.training.evaluate_every=1",
  )
  for line in run(config, tmp_path / "run", folders, *flags):
    assert "process 1 in its training data, process 2 in its validation" in line
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_other_versions_and_another_config(folders, tmp_path):
  config = training_cases.write_config(
    tmp_path,
    """
import importlib.metadata
own = importlib.metadata.version
if "--process=2" in sys.argv:
  importlib.metadata.version = lambda name: own(name) + ".dev1"
""",
  )
  flags = {"others": ["--config.optimizer.learning_rate=1e-3"]}
  for line in run(config, tmp_path / "run", folders, **flags):
    # Two of three have the same config; one of them has other versions.
    assert "process 0 in its config (optimizer.learning_rate 0.003" in line
    assert ", others 0.001), process 2 in its versions" in line
    assert "jax" in line
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_disks_of_their_own(folders, tmp_path):
  """Each would save its part of a checkpoint where no other sees it."""
  config = training_cases.write_config(
    tmp_path,
    "from memcomp.runs import workdir\nworkdir._WAIT_SECONDS = 1\n",
  )
  lines = run(config, "run", folders)
  assert "process 1 stopped while looking" in lines[0]
  for line in lines[1:]:
    assert "on a disk that all processes share" in line


@pytest.mark.slow
def test_the_usual_mesh(folders, tmp_path):
  config = training_cases.write_config(tmp_path)
  for line in run(config, tmp_path / "run", folders, "--config.mesh.replica=1"):
    assert "none of process 1, 2; set mesh.replica=-1" in line
