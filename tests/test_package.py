"""What `pip install` makes of the sdist and the wheel, with no clone at hand.

Nothing is downloaded: the wheel goes into a fresh environment that sees the
libraries of this one, but not its memcomp.
"""

import ast
import email
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

import memcomp
from memcomp import doctor

ROOT = pathlib.Path(__file__).parents[1]
VERSION = memcomp.__version__
BUILD = "import sys; from setuptools import build_meta as b; b.build_{}(*sys.argv[1:])"

# What a stranger does first: ops, layers, configs, the version.
IMPORTS = """
import importlib.metadata, json, sys
import memcomp, memcomp_kernels
from memcomp import cli, doctor, named_configs
from memcomp.layers import Trellis
from memcomp_kernels import gated_delta_rule

print(json.dumps({
  "files": [m.__file__ for m in (memcomp, memcomp_kernels)],
  "smoke": cli.load_config("smoke:lattice").name,
  "version": [memcomp.__version__, importlib.metadata.version("memcomp")],
  "configs": named_configs.names(),
  "requirements": repr(doctor.requirements()),
  "path": sys.path,
}))
"""


def run(*command, cwd, **variables):
  """Runs a command that does not see this clone; returns what it printed."""
  environment = os.environ | variables
  environment.pop("PYTHONPATH", None)
  environment.pop("XLA_FLAGS", None)  # eight devices, set for the tests
  done = subprocess.run(
    [str(part) for part in command],
    cwd=cwd,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
  """The sdist of a copy of this clone."""
  folder = tmp_path_factory.mktemp("sdist")
  clone = folder / "clone"
  clone.mkdir()
  for path in ROOT.iterdir():
    if path.is_file():
      shutil.copy(path, clone)
  ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
  for name in ("memcomp", "kernels", "configs", "tests"):
    shutil.copytree(ROOT / name, clone / name, ignore=ignore)
  run(sys.executable, "-c", BUILD.format("sdist"), folder, cwd=clone)
  return folder / f"memcomp-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist):
  """The wheel that the sdist gives."""
  folder = sdist.parent
  with tarfile.open(sdist) as file:
    file.extractall(folder, filter="data")
  source = folder / f"memcomp-{VERSION}"
  run(sys.executable, "-c", BUILD.format("wheel"), folder, cwd=source)
  return folder / f"memcomp-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
  """Folder of the programs of an environment with the wheel."""
  folder = tmp_path_factory.mktemp("installed") / "environment"
  venv.create(folder, symlinks=True)
  python = folder / "bin" / "python"
  install = ("install", "--no-index", "--no-deps", "--no-compile", wheel)
  pip = (sys.executable, "-m", "pip", "--python", python)
  run(*pip, *install, cwd=folder)
  # A path that stands in a .pth file is not searched for .pth files, such as
  # that of an editable install of this clone.
  places = {
    name: pathlib.Path(path) for name, path in sysconfig.get_paths().items()
  }
  (packages,) = folder.glob("lib/python*/site-packages")
  text = "\n".join({str(places["purelib"]), str(places["platlib"])})
  (packages / "libraries.pth").write_text(text)
  return python.parent


def sources():
  """Files of the distribution: path in the clone -> path in the wheel."""
  found = {}
  for folder, target in (
    ("memcomp", "memcomp"),
    ("kernels/memcomp_kernels", "memcomp_kernels"),
    ("configs", "memcomp/configs"),
  ):
    for path in (ROOT / folder).rglob("*"):
      if path.suffix == ".py" or path.name == "py.typed":
        inside = path.relative_to(ROOT / folder).as_posix()
        found[path.relative_to(ROOT).as_posix()] = f"{target}/{inside}"
  return found


def test_the_sdist(sdist):
  with tarfile.open(sdist) as file:
    names = {name.partition("/")[2] for name in file.getnames()}
  assert set(sources()) <= names
  wanted = (
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "pyproject.toml",
    "setup.py",
  )
  assert {*wanted, "constraints.txt", "train.py", "eval.py"} <= names
  assert not any(name.startswith("tests/") for name in names)


def test_the_wheel(wheel):
  with zipfile.ZipFile(wheel) as file:
    content = {name: file.read(name) for name in file.namelist()}
  info = f"memcomp-{VERSION}.dist-info"
  assert set(sources().values()) == {
    name for name in content if not name.startswith(info)
  }
  assert "memcomp/py.typed" in content
  metadata = email.message_from_bytes(content[f"{info}/METADATA"])
  assert (metadata["Name"], metadata["Version"]) == ("memcomp", VERSION)
  assert metadata["License-Expression"] == "Apache-2.0"
  assert content[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
  text = metadata.get_payload(decode=True).decode("utf-8")
  assert text.strip() == (ROOT / "README.md").read_text("utf-8").strip()
  # Of the machine that built it, nothing.
  for place in (ROOT, pathlib.Path.home(), wheel.parent):
    found = [n for n, text in content.items() if f"{place}/".encode() in text]
    assert not found, place


def bounds(requirements):
  """Requirements with the bounds of a range as a set, in no order."""
  if isinstance(requirements, str):
    return set(requirements.split(","))
  if isinstance(requirements, dict):
    return {key: bounds(value) for key, value in requirements.items()}
  return [bounds(part) for part in requirements]


def test_imports_with_no_clone(programs, tmp_path):
  version = run(programs / "memcomp", "--version", cwd=tmp_path)
  assert version == f"memcomp {VERSION}\n"
  found = json.loads(run(programs / "python", "-c", IMPORTS, cwd=tmp_path))
  assert all(f"{programs.parent}/" in file for file in found["files"])
  # An environment may lie in the clone, or beside it under a longer name.
  assert not {str(ROOT), str(ROOT / "kernels")} & {*found["path"]}
  assert found["smoke"] == "smoke-lattice"
  assert found["version"] == [VERSION, VERSION]
  assert set(found["configs"]) == {
    p.stem for p in (ROOT / "configs").glob("*.py")
  }
  installed = ast.literal_eval(found["requirements"])
  assert bounds(installed) == bounds(doctor.requirements())


@pytest.fixture(scope="module")
def call(programs, tmp_path_factory):
  """Calls memcomp in a folder of text: arguments -> what it printed."""
  folder = tmp_path_factory.mktemp("elsewhere")
  (folder / "text").mkdir()
  for number in range(20):
    path = folder / "text" / f"{number}.txt"
    path.write_text(f"{number} and so on. " * 20)

  def call(*arguments):
    program = programs / "memcomp"
    return run(program, *arguments, cwd=folder, JAX_PLATFORMS="cpu")

  call.folder = folder
  return call


@pytest.fixture(scope="module")
def trained(call):
  """Folder of a run of the config that compiles fastest."""
  settings = {
    "data.source": "text",
    "data.validation_share": 0.5,
    "training.steps": 2,
    "optimizer.warmup_steps": 1,
    "evaluation.run_after_training": False,
  }
  flags = [f"--config.{name}={value}" for name, value in settings.items()]
  out = call("train", "--config=smoke:linear_attention", *flags)
  assert "trained 2 steps" in out
  return call.folder / "runs" / "smoke-linear_attention"


@pytest.mark.slow
def test_training_with_no_clone(trained):
  assert (trained / "checkpoints" / "2").is_dir()
  assert len((trained / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_evaluation_with_no_clone(trained, call):
  out = call("eval", f"--checkpoint={trained}", "--task=perplexity")
  assert "bits per byte" in out
  found = json.loads((trained / "eval" / "perplexity.json").read_text())
  assert found["perplexity"]["streamed"]
