"""A platform that JAX has not is one line in every command."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import rotation

ROOT = pathlib.Path(__file__).parents[1]

# The imports are done once; every command then runs in a fork, which is safe as
# long as nothing has computed with JAX.
DRIVER = """
import json, os, runpy, sys, tempfile, traceback
sys.modules["libtpu"] = None  # as where it is not installed
import memcomp.convert.convert, memcomp.evaluation.run, memcomp.export.write
import memcomp.training.run
found = []
for argv in json.load(sys.stdin):
  with tempfile.TemporaryFile("w+") as err:
    pid = os.fork()
    if not pid:
      os.dup2(err.fileno(), 2)
      os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
      sys.argv[:], code = argv, 99
      try:
        if argv[0].endswith(".py"):
          runpy.run_path(argv[0], run_name="__main__")
        else:
          runpy.run_module(argv[0], run_name="__main__")
      except SystemExit as stop:
        code = stop.code
      except BaseException:
        traceback.print_exc()
      finally:
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    err.seek(0)
    found.append([code, err.read()])
print(json.dumps(found))
"""


CUDA = ("cuda", "its plugin is not installed")


@pytest.mark.parametrize(
  ("platform", "reason"),
  rotation.cases(
    [
      CUDA,
      ("typo", "Backend 'typo' is not in the list of known backends"),
      ("cpu,tpu", "libtpu.so: cannot open shared object file"),
    ],
    [CUDA],
  ),
)
def test_one_line(platform, reason, tmp_path):
  (tmp_path / "text.txt").write_text("the quick brown fox " * 400)
  checkpoint, out = f"--checkpoint={tmp_path}/text.txt", f"--out={tmp_path}/out"
  commands = [
    [
      str(ROOT / "train.py"),
      f"--config={ROOT}/configs/smoke.py",
      f"--config.data.source={tmp_path}/text.txt",
      f"--workdir={tmp_path}/run",
    ],
    [str(ROOT / "eval.py"), "--task=capacity", "--dims=8", "--samples=1", out],
    ["memcomp.export", checkpoint, out],
    ["memcomp.convert", checkpoint, "--mixer=trellis", f"--workdir={out}"],
  ]
  done = subprocess.run(
    [sys.executable, "-c", DRIVER],
    input=json.dumps(commands),
    env=os.environ
    | {"JAX_PLATFORMS": platform, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels"},
    capture_output=True,
    text=True,
    check=True,
  )
  found = json.loads(done.stdout)
  # Exports do not get as far: there is no checkpoint.
  for command, (code, err) in zip(commands, found, strict=True):
    assert code == 2, (command, err)
    (line,) = err.splitlines()
    if command[0] != "memcomp.export":
      assert line.startswith(
        f"error: JAX_PLATFORMS={platform}: JAX has no such"
      )
      assert reason in line and "unset JAX_PLATFORMS" in line
  assert not (tmp_path / "run").exists()
