"""Executes notebooks in one fresh process each, without Jupyter.

  python docs/notebooks/execute.py
  python docs/notebooks/execute.py --write docs/notebooks/train_and_sample.ipynb

It prints the CPU seconds of each notebook, and exits with 1 if a cell raises or
a notebook takes more than `LIMIT`. With --write it stores what cells print and
draw, so that a notebook can be read without running it. The stored outputs
carry a hash of the code that made them; a test compares it with the code.

A notebook runs in an empty folder, with the memcomp of this interpreter.
"""

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import tomllib
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
LIMIT = 300.0
"""CPU seconds that a notebook may take: 5 minutes, even on a single core."""

DPI = 72
"""Resolution of stored figures, which keeps them small."""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the code cells of a notebook, in order."""
  return [c for c in notebook["cells"] if c["cell_type"] == "code"]


def code_hash(notebook: dict[str, Any]) -> str:
  """Returns a hash of the code of all cells, layout and comments left out."""
  trees = [
    ast.dump(ast.parse("".join(c["source"]))) for c in code_cells(notebook)
  ]
  return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:16]


def repository() -> str:
  """Returns the address in pyproject.toml that Colab installs from, or ""."""
  with open(FOLDER.parents[1] / "pyproject.toml", "rb") as file:
    return tomllib.load(file)["project"].get("urls", {}).get("Repository", "")


def execute(notebook: dict[str, Any], name: str) -> float:
  """Runs all code cells in this process and fills in their outputs.

  Args:
    notebook: the notebook; its outputs are replaced.
    name: name of the notebook, for tracebacks.

  Returns:
    CPU seconds of all threads and subprocesses.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  pyplot.rcParams["figure.dpi"] = DPI
  namespace: dict[str, Any] = {"__name__": "__main__"}
  start = _cpu_seconds()
  for number, cell in enumerate(code_cells(notebook), 1):
    code = compile("".join(cell["source"]), f"{name} [{number}]", "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      exec(code, namespace)
    # The folder is one of this machine, and of this run.
    text = printed.getvalue().replace(f"{pathlib.Path.cwd()}{os.sep}", "")
    cell["execution_count"] = number
    cell["outputs"] = [_stream(text)] if text else []
    for figure in map(pyplot.figure, pyplot.get_fignums()):
      cell["outputs"].append(_image(figure))
    pyplot.close("all")
  return _cpu_seconds() - start


def _cpu_seconds() -> float:
  used = os.times()
  return time.process_time() + used.children_user + used.children_system


def _stream(text: str) -> dict[str, Any]:
  lines = text.splitlines(keepends=True)
  return {"name": "stdout", "output_type": "stream", "text": lines}


def _image(figure: Any) -> dict[str, Any]:
  png = io.BytesIO()
  figure.savefig(png, format="png", metadata={"Software": None})
  data = {"image/png": base64.b64encode(png.getvalue()).decode()}
  return {"data": data, "metadata": {}, "output_type": "display_data"}


def run_here(path: pathlib.Path, write: bool) -> int:
  """Executes a notebook in this process and an empty folder.

  Args:
    path: the notebook.
    write: whether to store its outputs.

  Returns:
    An exit code: 1 if it took more than `LIMIT`, else 0.
  """
  notebook = json.loads(path.read_text(encoding="utf-8"))
  with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    seconds = execute(notebook, path.name)
  print(f"{path.name}: {seconds:.0f} CPU seconds, at most {LIMIT:.0f}")
  if write:
    notebook["metadata"]["memcomp"] = {"outputs_of": code_hash(notebook)}
    text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
  return int(seconds > LIMIT)


def main() -> int:
  """Executes the notebooks that the command line names; returns a code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("notebooks", nargs="*", type=pathlib.Path)
  parser.add_argument("--write", action="store_true", help="store the outputs")
  parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
  given = parser.parse_args()
  if given.here:
    (path,) = given.notebooks
    return run_here(path, given.write)
  code = 0
  for path in given.notebooks or sorted(FOLDER.glob("*.ipynb")):
    options = ["--write"] if given.write else []
    command = [sys.executable, __file__, "--here", *options, path.resolve()]
    code |= subprocess.run(command).returncode
  return code


if __name__ == "__main__":
  sys.exit(main())
