"""Commands that documents tell their readers to run can be run.

Programs and flags exist, configs take the names they are given and have the
fields that are set. What the commands do is tested elsewhere.
"""

import functools
import pathlib
import re
import runpy

import pytest

from memcomp import config_flag
from memcomp.__main__ import COMMANDS
from memcomp.training import sweep

ROOT = pathlib.Path(__file__).parents[1]
_COMMAND = re.compile(
  r"(?:(?:^ +|`|&& |=\S+ |\bpython -m )(?=memcomp )|\bpython )"
  r"(memcomp \w+|-m memcomp\.[\w.]*|[\w/]+/\w+\.py|\w+\.py)\b(.*)",
  re.MULTILINE,
)
_CONFIG = re.compile(
  r"--config=(?:configs/(\w+)\.py|([a-z]\w*))(?:(?=\s)|$|:([\w-]+))"
)
_IN_A_CLONE = {"train.py": "memcomp train", "eval.py": "memcomp eval"}
_OF_BEAM = {"runner", "flink_master"}
"""Handed on to a library."""
_EXPORTED = {"numpy_forward.py"}
"""Stands in exported folders."""


def commands(document):
  text = (ROOT / document).read_text(encoding="utf-8")
  text = re.sub(r"\\\n\s*", " ", text)
  for program, rest in _COMMAND.findall(text):
    yield _IN_A_CLONE.get(program, program), re.split(r"`|  #", rest)[0]


DOCUMENTS = sorted(
  document
  for pattern in (
    *("*.md", "docs/**/*.md", "kernels/**/*.md", "configs/*.py"),
    *("benchmarks/**/*.py", "memcomp/**/*.py"),
  )
  for document in (p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern))
  if any(commands(document))
)


def source(program):
  if program.startswith("memcomp "):
    module = COMMANDS[program.removeprefix("memcomp ")].module
  elif program.startswith("-m "):
    module = program.removeprefix("-m ")
  else:
    return ROOT / program
  path = ROOT / module.rstrip(".").replace(".", "/")
  return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def flags_of(path):
  """What a program and the modules beside it define."""
  of = [ROOT / "memcomp/cli.py", path]
  if path.is_relative_to(ROOT / "benchmarks"):
    of += path.parent.glob("*.py")
  text = "".join(x.read_text(encoding="utf-8") for x in of)
  return set(
    re.findall(
      r'\b(?:DEFINE_\w+|declare_key_flag|add|add_argument)\(\s*"-*(\w+)"', text
    )
  )


@functools.cache
def config_file(name):
  return runpy.run_path(str(ROOT / f"configs/{name}.py"))


def check_config(config, name, rest):
  file = config_file(config)
  if each := re.search(r"--each[= ]([\w,-]+)", rest):
    assert sweep.choose(each[1], file, config)
    name = None
  fields = re.findall(r"--config\.([\w.]+)=", rest)
  if config == "run" or "$" in rest.split("--config=")[1].split()[0]:
    return  # of a run that is not here, or of several
  resolved = file["get_config"](*([name] if name else []))
  assert set(fields) <= config_flag.field_paths(resolved).keys()


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
    if program == "memcomp train" and (found := _CONFIG.search(rest)):
      check_config(found[1] or found[2], found[3], rest)


def test_there_are_commands():
  assert sum(len(list(commands(document))) for document in DOCUMENTS) > 100
