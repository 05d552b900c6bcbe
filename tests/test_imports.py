"""Which part of the package may import which."""

import ast
import pathlib

import pytest

import memcomp

ROOT = pathlib.Path(memcomp.__file__).parent
TRAIN = ("training", "convert", "compiling", "commands")
"""Parts that train, or compile the training step."""


def imported(path: pathlib.Path) -> set[str]:
  """Every module that a file imports, also within functions."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return found


def part_of(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).parts[0]


FILES = [
  path
  for path in sorted(ROOT.rglob("*.py"))
  if part_of(path) not in (*TRAIN, "__main__.py")
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_what_trains_imports_training(path):
  trains = tuple(f"memcomp.{part}" for part in TRAIN)
  assert not [name for name in imported(path) if name.startswith(trains)]


def test_only_the_doctor_runs_checks():
  """What users run does not depend on the contract suite."""
  users = {
    path.name
    for path in ROOT.rglob("*.py")
    if any(x.startswith("memcomp_kernels.testing") for x in imported(path))
  }
  assert users == {"doctor.py"}


def test_the_files_are_found():
  assert {"layers", "models", "inference", "evaluation", "export"} <= {
    part_of(path) for path in FILES
  }
