"""Whatever writes to a full disk says so in one line, and leaves nothing half.

Libraries write in several threads, and each of them has something to say. So
one program, of which all output is looked at, fills disks to many levels.
"""

import json
import subprocess
import sys

import pytest
import training_cases

PROGRAM = """
import contextlib, gc, io, json, os, pathlib, subprocess, sys
sys.path.insert(0, {tests!r})
import leaky, training_cases
from memcomp import cli, errors
from memcomp.convert import convert
from memcomp.data import prepare
from memcomp.evaluation import load, report, run as evaluation
from memcomp.export import write
from memcomp.inference import saved
from memcomp.inference import session as session_lib
from memcomp.models import decoder
from memcomp.training import run as run_lib

folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
cli.silence_libraries()
disk, sizes = folder / "disk", range(*map(int, sys.argv[3:]))
disk.mkdir()
text = training_cases.write_text(folder / "text")
config = training_cases.tiny(text, steps=4, checkpoint_every=1)
config.data.validation = text
run = folder / "run"
if what == "train":
  decoder.Decoder = leaky.Decoder
elif what != "prepare":
  config.training.steps = 3
  with contextlib.redirect_stdout(io.StringIO()):
    run_lib.run(config, run)
  opened = load.open_checkpoint(run)
  owner = saved.Owner(opened.model, opened.config.model, opened.tokenizer)
  session = session_lib.start(opened.model)
write_it = {{
  "train": lambda: run_lib.run(config, disk / "out"),
  "session": lambda: saved.save(disk / "out", session, owner),
  "export": lambda: write.export(run, disk / "out"),
  "orbax": lambda: write.export(run, disk / "out", format="orbax"),
  "evaluate": lambda: evaluation.run(
    run, "perplexity", out=str(disk / "out"), overrides={{"lengths": 1, "rows": 1}}
  ),
  "convert": lambda: convert.convert(
    run, disk / "out", "trellis", distill_steps=0
  ),
  "prepare": lambda: prepare.prepare(text, str(disk / "out"), workers=1),
}}[what]
for kilobytes in sizes:
  mount = f"mount -t tmpfs -o size={{kilobytes}}k tmpfs {{disk}}"
  subprocess.run(mount.split(), check=True)
  message = "done"
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      write_it()
  except errors.UserError as error:
    message = str(error)
  gc.collect()
  left = [path.name for path in disk.iterdir()]
  subprocess.run(["umount", "-l", str(disk)], check=True)
  print(json.dumps([message, left]), flush=True)
"""


@pytest.fixture
def fill(tmp_path):
  """Returns what was said, and left, at each size of the disk in KB."""
  mount = f"mount -t tmpfs -o size=100k tmpfs {tmp_path}"
  if subprocess.run(mount.split(), capture_output=True).returncode:
    pytest.skip("mounting a small disk is not permitted here")
  subprocess.run(["umount", "-l", str(tmp_path)], check=True)

  def fill(what, *sizes):
    program = PROGRAM.format(tests=str(training_cases.HERE))
    done = subprocess.run(
      [sys.executable, "-c", program, str(tmp_path), what, *map(str, sizes)],
      env=training_cases.environment(),
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    for word in ("Traceback", "Error", "ERROR"):
      assert word not in done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    messages = [message for message, _ in found if message != "done"]
    assert messages, "no disk was too small"
    assert len(messages) < len(found), "all disks were too small"
    for message in messages:
      assert "No space left on device" in message and "free" in message
      assert "\n" not in message
    return found

  return fill


@pytest.mark.slow
@pytest.mark.parametrize(
  ("what", "sizes"),
  [
    ("session", (16, 136, 20)),
    pytest.param("orbax", (20, 220, 40), marks=pytest.mark.slow),
    pytest.param("export", (12, 132, 20), marks=pytest.mark.slow),
    pytest.param("convert", (60, 460, 80), marks=pytest.mark.slow),
  ],
)
def test_a_folder_is_whole_or_absent(fill, what, sizes):
  for message, left in fill(what, *sizes):
    assert left == (["out"] if message == "done" else [])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("what", "sizes"),
  [
    ("train", (60, 1060, 200)),
    ("evaluate", (4, 164, 20)),
    ("prepare", (12, 252, 40)),
  ],
)
def test_a_line_and_nothing_else(fill, what, sizes):
  for _, left in fill(what, *sizes):
    assert left in ([], ["out"])
