"""Tests that take turns: slow ones, of which each CI run takes a part.

`--part=K/N` runs one of N parts of the selected tests, the same in every run.
"""

import argparse
import pathlib
import zlib

import pytest


def cases(values, always=()):
  """Returns parameters of a test, of which those not in `always` are slow.

  Args:
    values: of a parameter, or tuples of several.
    always: those of them that every run takes.
  """
  return [
    pytest.param(
      *(value if isinstance(value, tuple) else (value,)),
      marks=() if value in always else pytest.mark.slow,
    )
    for value in values
  ]


def both_parts(test):
  """Parametrizes a test by `gradient`: values always, gradients if slow."""
  return pytest.mark.parametrize(
    "gradient", cases([False, True], [False]), ids=["values", "gradients"]
  )(test)


def part_of(text: str) -> tuple[int, int]:
  """Returns (2, 12) for "2/12"."""
  number, _, count = text.partition("/")
  if not (number.isdecimal() and count.isdecimal()):
    raise argparse.ArgumentTypeError(f"{text!r} is not K/N, such as 2/12")
  if not 1 <= int(number) <= int(count):
    raise argparse.ArgumentTypeError(f"{text!r}: K must be 1 to N")
  return int(number), int(count)


def pytest_addoption(parser):
  parser.getgroup("memcomp").addoption(
    "--part",
    metavar="K/N",
    type=part_of,
    help="run the K-th of N parts of the selected tests",
  )


def place(nodeid: str, count: int) -> int:
  """The part, 1 to `count`, that a test belongs to.

  By the names of its file and of its parameters: tests that share these share
  what they compile.
  """
  path, _, name = nodeid.partition("::")
  shared = f"{pathlib.PurePosixPath(path).name}[{name.partition('[')[2]}"
  return zlib.crc32(shared.encode()) % count + 1


def pytest_collection_modifyitems(config, items):
  if config.option.part is None:
    return
  number, count = config.option.part
  others = [item for item in items if place(item.nodeid, count) != number]
  config.hook.pytest_deselected(items=others)
  items[:] = [item for item in items if place(item.nodeid, count) == number]
