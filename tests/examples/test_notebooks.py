"""Notebooks run as they stand, and hold nothing of the machine they ran on."""

import base64
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 700_000
"""Of a notebook with its outputs."""

_MACHINE = re.compile(
  r"(?<![\w.:/])/(?:work|home|root|tmp|usr|opt|mnt|Users|content)\b|[A-Z]:\\|site-packages"
)
_ADDRESS = re.compile(r"\w+://")


def load_execute():
  spec = importlib.util.spec_from_file_location(
    "execute_notebooks", FOLDER / "execute.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


execute = load_execute()


def read(path):
  return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
  return "".join(cell["source"])


def make(tmp_path, *cells):
  """A notebook of code cells."""
  code = {"cell_type": "code", "execution_count": None, "metadata": {}}
  path = tmp_path / "made.ipynb"
  found = [{**code, "outputs": [], "source": [text]} for text in cells]
  path.write_text(json.dumps({"cells": found, "metadata": {}}))
  return path


def by_name(paths):
  return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def test_there_are_notebooks():
  assert len(NOTEBOOKS) >= 3


@by_name(NOTEBOOKS)
def test_format(path):
  text = path.read_text(encoding="utf-8")
  notebook = json.loads(text)
  assert len(text) <= MAX_BYTES
  assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5
  assert notebook["metadata"]["kernelspec"]["name"] == "python3"
  assert source(notebook["cells"][0]).startswith("# ")
  ids = [cell["id"] for cell in notebook["cells"]]
  assert len(set(ids)) == len(ids)
  for cell in notebook["cells"]:
    keys = {"cell_type", "id", "metadata", "source"}
    if cell["cell_type"] == "code":
      keys |= {"execution_count", "outputs"}
      compile(source(cell), path.name, "exec")  # no magics: runs anywhere
    else:
      assert cell["cell_type"] == "markdown"
    assert cell.keys() == keys
    assert isinstance(cell["source"], list) and source(cell).strip()


@by_name(NOTEBOOKS)
def test_outputs_are_of_the_code(path):
  notebook = read(path)
  made_by = notebook["metadata"]["memcomp"]["outputs_of"]
  assert made_by == execute.code_hash(notebook), (
    f"run: python docs/notebooks/execute.py --write {path.name}"
  )
  images = 0
  for number, cell in enumerate(execute.code_cells(notebook), 1):
    assert cell["execution_count"] == number
    for output in cell["outputs"]:
      assert output["output_type"] in ("stream", "display_data")
      if output["output_type"] == "display_data":
        (kind, data) = next(iter(output["data"].items()))
        assert kind == "image/png"
        assert base64.b64decode(data).startswith(b"\x89PNG")
        images += 1
  assert images


def test_the_trained_state_helps():
  """As the notebook says beneath: from the second window on."""
  notebook = read(FOLDER / "train_and_sample.ipynb")
  printed = "".join(
    line
    for cell in execute.code_cells(notebook)
    for output in cell["outputs"]
    for line in output.get("text", [])
  )
  pairs = re.findall(r"([\d.]+) handed on, ([\d.]+) fresh", printed)
  assert len(pairs) == 5
  assert all(float(on) < float(fresh) for on, fresh in pairs[1:])


@by_name(NOTEBOOKS)
def test_no_path_of_a_machine_and_no_address(path):
  for cell in read(path)["cells"]:
    shown = [source(cell)]
    for output in cell.get("outputs", []):
      shown.append("".join(output.get("text", [])))
    for text in shown:
      assert not _MACHINE.search(text), _MACHINE.search(text)
      # The repository's own is the one address that a notebook may name.
      text = text.replace(execute.repository() or "\0", "")
      assert not _ADDRESS.search(text), _ADDRESS.search(text)


@pytest.mark.parametrize(
  "text", ["see /work/x", "'/tmp/a'", "C:\\x", "lib/site-packages/jax"]
)
def test_machine_paths_are_found(text):
  assert _MACHINE.search(text)


def test_first_code_cell_installs():
  firsts = {source(execute.code_cells(read(path))[0]) for path in NOTEBOOKS}
  (first,) = firsts  # the same in all
  assert 'find_spec("memcomp") is None' in first and '"pip"' in first
  assert f'REPOSITORY = "{execute.repository()}"' in first


def test_first_code_cell_where_nothing_is_installed(tmp_path, monkeypatch):
  """It asks for an address, or installs the clone around the notebook."""
  first = source(execute.code_cells(read(NOTEBOOKS[0]))[0])
  first = re.sub(r'REPOSITORY = ".*"', 'REPOSITORY = ""', first)
  ran = []
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(subprocess, "run", lambda c, **_: ran.append(c))
  monkeypatch.chdir(tmp_path)
  with pytest.raises(RuntimeError, match="set REPOSITORY"):
    exec(first, {})
  (tmp_path / "memcomp").mkdir()
  (tmp_path / "docs/notebooks").mkdir(parents=True)
  monkeypatch.chdir(tmp_path / "docs/notebooks")
  exec(first, {})
  monkeypatch.chdir("/")
  address = "https://example.org/memcomp.git"
  exec(first.replace('REPOSITORY = ""', f'REPOSITORY = "{address}"'), {})
  assert [command[-2] for command in ran] == [str(tmp_path), f"git+{address}"]


def test_first_code_cell_where_numpy_was_loaded(tmp_path, monkeypatch):
  """As on Colab: what was upgraded under a running Python needs a new one."""
  first = source(execute.code_cells(read(NOTEBOOKS[0]))[0])
  (tmp_path / "memcomp").mkdir()
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
  exec(first, {})
  monkeypatch.setattr("numpy.__version__", "2.1.3")
  with pytest.raises(
    RuntimeError, match=r"numpy 2\.1\.3 .*restart the session"
  ):
    exec(first, {})


def test_a_cell_that_raises_fails(tmp_path):
  path = make(tmp_path, "x = 1", "assert x == 2, 'wrong'")
  with pytest.raises(AssertionError, match="wrong"):
    execute.run_here(path, write=False)


def test_a_notebook_that_takes_too_long_fails(tmp_path, monkeypatch):
  path = make(tmp_path, "x = 1")
  assert execute.run_here(path, write=False) == 0
  monkeypatch.setattr(execute, "LIMIT", 0.0)
  assert execute.run_here(path, write=False) == 1


def test_outputs_are_stored(tmp_path):
  path = make(
    tmp_path,
    "import pathlib; print(pathlib.Path('run').absolute())",
    "from matplotlib import pyplot; pyplot.plot([1, 2]); pyplot.show()",
  )
  assert execute.run_here(path, write=True) == 0
  notebook = read(path)
  assert notebook["cells"][0]["outputs"][0]["text"] == ["run\n"]
  assert "image/png" in notebook["cells"][1]["outputs"][0]["data"]
  assert notebook["metadata"]["memcomp"]["outputs_of"] == execute.code_hash(
    notebook
  )


@pytest.mark.slow
@by_name(NOTEBOOKS)
def test_notebook_runs(path):
  """In a process of its own, within `execute.LIMIT` CPU seconds."""
  environment = {
    key: value
    for key, value in os.environ.items()
    # A reader has one device, and XLA's optimisations.
    if key not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
  }
  root = FOLDER.parents[1]
  environment["PYTHONPATH"] = f"{root}{os.pathsep}{root / 'kernels'}"
  done = subprocess.run(
    [sys.executable, FOLDER / "execute.py", path],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "CPU seconds" in done.stdout
