"""Checksums of a committed checkpoint, to detect damage.

Orbax commits atomically, so a killed run leaves no partial checkpoint. But a
disk, a copy or a truncation can damage one, and Orbax would restore a flipped
bit without an error.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator

import tensorstore as ts
from etils import epath

from memcomp import disk, errors, paths

MANIFEST = "sha256.json"


def write(directory: pathlib.Path) -> None:
  """Writes a file with the checksums of all files under `directory`."""
  manifest = {"version": 1, "files": _digests(directory)}
  replace_text(directory / MANIFEST, json.dumps(manifest, indent=1))


def digest(directory: epath.Path) -> str:
  """Returns one SHA-256 over all files of a checkpoint that `problem` passes.

  The value does not depend on whether the folder has a file of checksums.
  """
  path = directory / MANIFEST
  if path.exists():
    found = json.loads(path.read_text())["files"]
  else:
    found = _digests(pathlib.Path(directory))
  return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def problem(directory: epath.Path) -> str | None:
  """Returns the problem with a checkpoint's files, or None.

  A checkpoint without checksums passes, see `unreadable`. It lies in a bucket,
  or the run was killed before writing them.
  """
  path = directory / MANIFEST
  if not path.exists():
    return None
  try:
    expected = json.loads(path.read_text())["files"].items()
  except (*errors.BAD_JSON, AttributeError, KeyError, TypeError):
    return f"{MANIFEST} cannot be read"
  for name, digest in expected:
    file = directory / name
    if not file.is_file():
      return f"{name} is missing"
    if _digest(file) != digest:
      return f"{name} has changed since it was written"
  return None


@contextlib.contextmanager
def reading(directory: pathlib.Path, what: str) -> Iterator[None]:
  """Reports unreadable arrays as damaged.

  Args:
    directory: folder with the arrays and their checksums.
    what: what they are, as the beginning of the message.

  Raises:
    UserError: the block failed and there are no checksums. With checksums,
      which `problem` has compared, the reader is at fault and its error passes.
  """
  try:
    yield
  except (errors.UserError, OSError, MemoryError):
    raise
  except Exception as error:
    if (directory / MANIFEST).exists():
      raise
    cause = " ".join(str(error).split())[:200]
    raise errors.UserError(
      f"{what} is damaged ({cause}); restore it from a copy"
    ) from error


def replace_text(path: pathlib.Path, text: str) -> None:
  """Writes a file completely or not at all, even after a power cut."""
  with (
    disk.replacing(path) as temporary,
    # Names of files and runs may hold bytes that are no UTF-8.
    open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file,
  ):
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def unreadable(directory: epath.Path) -> str | None:
  """Returns what is missing in a checkpoint without checksums, or None.

  A checkpoint in a bucket passes. Orbax would also find the problem, but in all
  processes together: if one fails, the others wait for it.
  """
  if (directory / MANIFEST).exists() or paths.is_remote(directory):
    return None
  for name in ("params", "state"):
    item = directory / name
    try:
      arrays = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"})
      arrays = arrays.result()
      for key in arrays.list().result():
        arrays.read(key).result()
    except ValueError as error:
      if of_machine(error):
        raise
      return f"{name}: {' '.join(str(error).split())[:200]}"
  texts = (
    "data/metadata",
    "meta/metadata",
    "params/_METADATA",
    "state/_METADATA",
  )
  for name in texts:
    try:
      json.loads((directory / name).read_text())
    except (OSError, *errors.BAD_JSON) as error:
      return f"{name}: {error}"
  return None


def of_machine(error: BaseException) -> bool:
  """Whether a read failed by the machine, such as for want of memory.

  The files may then be whole. A file that is missing is damage.
  """
  missing = isinstance(error, FileNotFoundError)
  return not missing and errors.reason(error) is not None


def _digests(directory: pathlib.Path) -> dict[str, str]:
  return {
    str(path.relative_to(directory)): _digest(path)
    for path in _files(directory)
  }


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
  found = (p for p in directory.rglob("*") if p.is_file())
  return sorted(p for p in found if MANIFEST not in p.name)


def _digest(path: os.PathLike) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
