"""Checksums of a committed checkpoint, to tell rot from a good one.

Orbax commits atomically, so a killed run leaves no half checkpoint; a disk, a
copy or a truncation can still damage one, and a flipped bit in an array would
restore without an error.
"""

import hashlib
import json
import os
import pathlib

MANIFEST = "sha256.json"


def write(directory: pathlib.Path) -> None:
  """Writes the checksums of the files under `directory` beside them."""
  manifest = {
    "version": 1,
    "files": {
      str(path.relative_to(directory)): _digest(path)
      for path in _files(directory)
    },
  }
  replace_text(directory / MANIFEST, json.dumps(manifest, indent=1))


def problem(directory: pathlib.Path) -> str | None:
  """Returns what is wrong with a checkpoint's files, or None.

  A checkpoint without checksums (the run was killed between the commit and
  their writing) passes: what orbax cannot read fails when it is restored.
  """
  path = directory / MANIFEST
  if not path.exists():
    return None
  try:
    expected = json.loads(path.read_text())["files"]
  except (ValueError, KeyError, TypeError):
    return f"{MANIFEST} cannot be read"
  for name, digest in expected.items():
    file = directory / name
    if not file.is_file():
      return f"{name} is missing"
    if _digest(file) != digest:
      return f"{name} has changed since it was written"
  return None


def replace_text(path: pathlib.Path, text: str) -> None:
  """Writes a file so that it is whole or absent, also after a power cut."""
  temporary = path.with_name(f".{path.name}.tmp")
  with open(temporary, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
  found = (p for p in directory.rglob("*") if p.is_file())
  return sorted(p for p in found if MANIFEST not in p.name)


def _digest(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
