"""A home that cannot be written: programs take longer to start, and say nothing."""

import subprocess
import sys

import pytest
import rotation
import training_cases


@pytest.fixture(params=rotation.cases(["read-only", "full"], ["read-only"]))
def home(request, tmp_path):
  """With a folder for programs, as from a time when it could be written."""
  folder = tmp_path / "home"
  folder.mkdir()
  mount = f"mount -t tmpfs -o size=100k tmpfs {folder}"
  if subprocess.run(mount.split(), capture_output=True).returncode:
    pytest.skip("mounting a file system is not permitted here")
  (folder / ".cache/memcomp").mkdir(parents=True)
  if request.param == "read-only":
    mount = f"mount -o remount,ro {folder}"
    subprocess.run(mount.split(), check=True)
  else:
    with pytest.raises(OSError, match="No space"):
      (folder / "file").write_bytes(bytes(200_000))
  yield folder
  subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_run(home, tmp_path):
  config = training_cases.write_config(tmp_path, training_cases.LEAKY)
  environment = training_cases.environment(HOME=str(home))
  for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "MPLCONFIGDIR"):
    environment.pop(name, None)
  done = subprocess.run(
    [
      *(sys.executable, training_cases.ROOT / "train.py"),
      *(f"--config={config}", f"--workdir={tmp_path}/run"),
    ],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr) == (0, "")
  pytest.importorskip("matplotlib")
  assert (tmp_path / "run/loss.png").exists()
