"""Arrays in safetensors files; large models are split.

A single file is `model.safetensors`. Several are
`model-00001-of-00003.safetensors` and so on, and `model.safetensors.index.json`
maps each array to its file.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memcomp import errors, integrity

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Item(NamedTuple):
  """An array to write: name, bytes, and a function that returns it."""

  name: str
  num_bytes: int
  get: Callable[[], np.ndarray]


def write(
  folder: pathlib.Path, items: Sequence[Item], *, shard_bytes: int
) -> None:
  """Writes arrays, with those of one file in memory at a time.

  Args:
    folder: an existing folder.
    items: the arrays.
    shard_bytes: maximum bytes of arrays per file; a larger array has its own.

  Raises:
    UserError: the library is missing.
  """
  save_file = _library().numpy.save_file
  shards = _cut(items, shard_bytes)
  names = {}
  for number, shard in enumerate(shards, 1):
    file = SINGLE
    if len(shards) > 1:
      file = f"model-{number:05}-of-{len(shards):05}.safetensors"
    # The library ignores strides and writes memory in order.
    arrays = {item.name: np.ascontiguousarray(item.get()) for item in shard}
    save_file(arrays, folder / file, metadata={"format": "np"})
    # The library creates files that only the owner can read.
    (folder / file).chmod(0o644)
    names |= dict.fromkeys(arrays, file)
  if len(shards) > 1:
    total = sum(item.num_bytes for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    integrity.replace_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


class Arrays:
  """The arrays of a folder by name, read on demand.

  Attributes:
    names: names of all arrays.
  """

  def __init__(self, folder: pathlib.Path, where: dict[str, str], files):
    self._folder, self._where, self._files = folder, where, files
    self.names = frozenset(where)

  def __call__(self, name: str) -> np.ndarray:
    """Reads one array.

    Raises:
      UserError: there is no array with this name, or not in its file.
    """
    if name not in self._where:
      raise errors.UserError(
        f"{self._folder} has no array {name}: it is of another model than its"
        " config.json says"
      )
    file = self._where[name]
    try:
      return self._files[file].get_tensor(name)
    except _library().SafetensorError as error:
      raise errors.UserError(
        f"{self._folder / file} cannot be read: {error}; restore it and {INDEX}"
        " from one copy"
      ) from error

  def check_all_in(self, known: Collection[str], model: str) -> None:
    """Raises UserError if there are others than those of `model`."""
    spare = sorted(self.names - set(known))
    if spare:
      raise errors.UserError(
        f"{self._folder} has arrays that {model} has not:"
        f" {', '.join(spare[:3])}{' ...' if len(spare) > 3 else ''};"
        " take config.json and arrays from one copy"
      )


@contextlib.contextmanager
def opened(folder: pathlib.Path) -> Iterator[Arrays]:
  """Opens the safetensors files of a folder.

  Raises:
    UserError: there are none, one is missing or damaged, or the library is
      missing.
  """
  library = _library()
  with contextlib.ExitStack() as stack:

    def open_file(name):
      path = folder / name
      try:
        return stack.enter_context(library.safe_open(path, framework="np"))
      except (OSError, library.SafetensorError) as error:
        reason = errors.reason(error) or f"{error}; restore it from a copy"
        raise errors.UserError(f"{path} cannot be read: {reason}") from error

    if (folder / INDEX).exists():
      where = _index(folder / INDEX)
      files = {name: open_file(name) for name in sorted(set(where.values()))}
    elif (folder / SINGLE).exists():
      files = {SINGLE: open_file(SINGLE)}
      where = dict.fromkeys(files[SINGLE].keys(), SINGLE)
    else:
      raise errors.UserError(
        f"{folder} has neither {SINGLE} nor {INDEX}; give the folder of a model"
      )
    yield Arrays(folder, where, files)


def _index(path: pathlib.Path) -> dict[str, str]:
  try:
    where = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    if not all(isinstance(file, str) for file in where.values()):
      raise TypeError("weight_map has a file that is no text")
    return where
  except (OSError, *errors.BAD_JSON, KeyError, TypeError) as error:
    raise errors.UserError(
      f"{path} cannot be read ({error}); restore it from a copy"
    ) from error


def _cut(items: Sequence[Item], shard_bytes: int) -> list[list[Item]]:
  shards, size = [], 0
  for item in items:
    if not shards or size + item.num_bytes > shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(item)
    size += item.num_bytes
  return shards


def _library():
  try:
    import safetensors
    import safetensors.numpy
  except ImportError as error:
    raise errors.UserError(
      "this needs the library safetensors: pip install 'memcomp[export]'"
    ) from error
  return safetensors
