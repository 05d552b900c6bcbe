"""Commands that documents tell their readers to run can be run.

Programs and flags exist, configs take the names they are given and have the
fields that are set. What the commands do is tested elsewhere.
"""

import functools
import pathlib
import re
import runpy

import pytest

from memcomp.training import sweep

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted(
  path.relative_to(ROOT).as_posix()
  for pattern in (
    *("*.md", "docs/**/*.md", "kernels/**/*.md", "configs/*.py"),
    *("*.py", "benchmarks/**/*.py", "memcomp/**/*.py"),
  )
  for path in ROOT.glob(pattern)
  if "python " in path.read_text(encoding="utf-8")
)
_COMMAND = re.compile(
  r"\bpython (-m memcomp[\w.]*|[\w/]+/\w+\.py|\w+\.py) (.*)"
)
_OF_BEAM = {"runner", "flink_master"}
"""Handed on to a library."""
_EXPORTED = {"numpy_forward.py"}
"""Stands in exported folders."""


def commands(document):
  text = (ROOT / document).read_text(encoding="utf-8")
  text = re.sub(r"\\\n\s*", " ", text)
  for program, rest in _COMMAND.findall(text):
    yield program, re.split(r"`|  #", rest)[0]


def source(program):
  if not program.startswith("-m "):
    return ROOT / program
  path = ROOT / program.removeprefix("-m ").replace(".", "/")
  return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def flags_of(path):
  """What a program and the modules beside it define."""
  of = [ROOT / "memcomp/cli.py", path]
  if path.is_relative_to(ROOT / "benchmarks"):
    of += path.parent.glob("*.py")
  text = "".join(x.read_text(encoding="utf-8") for x in of)
  return set(re.findall(r'\b(?:DEFINE_\w+|add)\(\s*"-*(\w+)"', text))


@functools.cache
def config_file(path):
  return runpy.run_path(str(ROOT / path))


def check_config(path, name, rest):
  file = config_file(path)
  if each := re.search(r"--each[= ]([\w,-]+)", rest):
    assert sweep.choose(each[1], file, path)
    name = None
  fields = re.findall(r"--config\.([\w.]+)=", rest)
  if path == "configs/run.py" or "$" in rest.split("--config=")[1].split()[0]:
    return  # of a run that is not here, or of several
  resolved = file["get_config"](*([name] if name else []))
  for field in fields:
    functools.reduce(getattr, field.split("."), resolved)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_commands(document):
  for program, rest in commands(document):
    path = source(program)
    assert path.exists() or program in _EXPORTED, program
    if not path.exists():
      continue
    given = set(re.findall(r"(?<![\w-])--(\w+)", rest)) - _OF_BEAM
    known = flags_of(path)
    known |= {f"no{flag}" for flag in known} | {"help"}
    assert given <= known, (program, given - known)
    found = re.search(r"--config=(configs/\w+\.py)(?::([\w-]+))?", rest)
    if found and program.startswith("train"):
      check_config(*found.groups(), rest)


def test_there_are_commands():
  assert sum(len(list(commands(document))) for document in DOCUMENTS) > 100
