"""Paths on this machine or in a bucket.

Paths in a bucket are written gs://BUCKET/FOLDER. Buckets have no locks, appends
or renames, so only checkpoints and prepared shards may lie in one.
"""

import contextlib
import importlib.util
import io
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from memcomp import errors

_SCHEME = "gs://"
_LIBRARIES = ("gcsfs", "tensorflow")  # epath accepts either


def expand(path: str | os.PathLike[str]) -> str:
  """Replaces a ~ at the beginning of a path by the home folder.

  A shell does this for a word that begins with ~, but not in --flag=~/path.

  Raises:
    UserError: the home folder is unknown, or it is not a path.
  """
  given = os.fspath(path)
  if "\0" in given:
    raise errors.UserError(f"{given!r} has a null byte in it; correct the path")
  found = os.path.expanduser(given)
  if given.startswith("~") and found == given:
    raise errors.UserError(
      f"{given}: no home folder is known for it; write the path in full"
    )
  return found


def is_remote(path: str | os.PathLike) -> bool:
  """Whether a path lies in a bucket."""
  return os.fspath(path).startswith(_SCHEME)


def check_local(flag: str, path: str | os.PathLike) -> None:
  """Checks that a folder to write to is not in a bucket.

  Raises:
    UserError: it is.
  """
  if is_remote(path):
    raise errors.UserError(
      f"--{flag}={os.fspath(path)}: only checkpoints are written to a bucket,"
      " which has no locks and no renames; name a folder on this machine and"
      " copy it"
    )


def of(path: str | os.PathLike) -> epath.Path:
  """Returns an absolute path object for this machine or a bucket.

  Raises:
    UserError: it lies in a bucket, and the required library is missing.
  """
  if not is_remote(path):
    return epath.Path(os.path.abspath(path))
  if not any(importlib.util.find_spec(name) for name in _LIBRARIES):
    raise errors.UserError(
      f"{os.fspath(path)} lies in a bucket, which needs the library gcsfs: pip"
      " install 'memcomp[gcs]'"
    )
  return epath.Path(path)


def read_json(path: str | os.PathLike, fix: str) -> dict[str, Any]:
  """Reads an object from a JSON file.

  Args:
    path: the file.
    fix: what to do if it cannot be read, as the end of the message.

  Raises:
    UserError: it does not contain a JSON object.
    OSError: it cannot be read.
  """
  text = of(path).read_bytes()
  try:
    found = json.loads(text)
  except errors.BAD_JSON as error:
    raise errors.UserError(
      f"{os.fspath(path)} is not JSON ({error}); {fix}"
    ) from error
  if not isinstance(found, dict):
    raise errors.UserError(f"{os.fspath(path)} is no JSON object; {fix}")
  return found


@contextlib.contextmanager
def reading_text(
  what: str, *, place: str = "", fix: str = "check the path"
) -> Iterator[None]:
  """Reports a text file that the block cannot read.

  Args:
    what: the file.
    place: where it was named, as the beginning of the message.
    fix: what to do if it cannot be opened, as the end of the message.

  Raises:
    UserError: the block raised an OSError, or the file is not UTF-8.
  """
  try:
    yield
  except OSError as error:
    raise errors.UserError(
      f"{place}cannot read {what}: {error.strerror}; {fix}"
    ) from error
  except UnicodeDecodeError as error:
    raise errors.UserError(
      f"{place}{what} is not UTF-8 (byte {error.start}); convert the file"
    ) from error


def open_binary(path: str | os.PathLike) -> io.BufferedIOBase:
  """Opens a file to read its bytes.

  Raises:
    UserError: see `of`.
    OSError: it cannot be read.
  """
  stream: Any = of(path).open("rb")
  return stream
