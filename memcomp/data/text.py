"""Finds text files and reads the documents in them."""

import dataclasses
import glob
import gzip
import io
import json
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator

from memcomp import errors

EXTENSIONS = (".txt", ".md", ".py", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst")

# Beside tests: `encodings` is one table many times over, `pydoc_data` one
# generated text, `_sysconfigdata*` names paths of the machine it was built on.
_NOT_LIBRARY = {
  "test",
  "tests",
  "idle_test",
  "encodings",
  "pydoc_data",
  "site-packages",
  "dist-packages",
  "__pycache__",
}


@dataclasses.dataclass(frozen=True)
class TextFile:
  """A file of text.

  Attributes:
    name: path relative to the folder or pattern it was found by; decides on
      which side of the validation split its documents fall.
    path: where it is.
  """

  name: str
  path: str

  @property
  def is_jsonl(self) -> bool:
    """Whether each line is a document of its own."""
    return any(self.path.endswith(".jsonl" + c) for c in COMPRESSIONS)


def find(source: str) -> list[TextFile]:
  """Lists the text files of a source, sorted by name.

  Args:
    source: "stdlib", a file, a folder (searched with its sub-folders, hidden
      ones left out) or a glob.

  Raises:
    UserError: nothing there, or an extension that is no text.
  """
  if source == "stdlib":
    return _find_stdlib()
  if os.path.isdir(source):
    found = _walk(source)
    if not found:
      raise errors.UserError(
        f"{source}: no text files in this folder; it needs "
        f"{', '.join(EXTENSIONS)} (also .gz or .zst)"
      )
    return found
  if os.path.exists(source):
    if not _is_text(source):
      raise errors.UserError(
        f"{source}: unknown extension; rename it to one of "
        f"{', '.join(EXTENSIONS)} (also .gz or .zst) or .bin"
      )
    if not os.path.getsize(source):
      raise errors.UserError(f"{source}: the file is empty; give one with text")
    return [TextFile(os.path.basename(source), source)]
  if glob.has_magic(source):
    return _find_glob(source)
  raise errors.UserError(
    f"{source}: no such file or folder; check data.source and data.validation"
  )


def documents(file: TextFile) -> Iterator[tuple[int, bytes]]:
  """Reads the documents of a file.

  Yields:
    (line, text): the line number from 1 for .jsonl, else 0; valid UTF-8.

  Raises:
    UserError: unreadable, truncated, not UTF-8 or not JSON; says the line.
  """
  with open_binary(file.path) as stream:
    if file.is_jsonl:
      yield from json_lines(file.path, enumerate(stream, 1))
    else:
      content = stream.read()
      _check_utf8(file.path, content)
      yield 0, content


def json_lines(
  path: str, lines: Iterator[tuple[int, bytes]]
) -> Iterator[tuple[int, bytes]]:
  """Takes the field "text" out of numbered lines of JSON; skips blank lines."""
  for number, line in lines:
    _check_utf8(path, line, number)
    if line.isspace():
      continue
    try:
      record = json.loads(line.decode())
    except (json.JSONDecodeError, RecursionError) as error:
      raise errors.UserError(
        f"{path}:{number}: invalid JSON ({error}); each line must be an object "
        'such as {"text": "..."}'
      ) from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
      raise errors.UserError(
        f'{path}:{number}: no field "text" holding a string; each line must '
        'be an object such as {"text": "..."}'
      )
    try:
      yield number, record["text"].encode()
    except UnicodeEncodeError as error:
      raise errors.UserError(
        f'{path}:{number}: "text" has half of a surrogate pair, which has no '
        "UTF-8 form; remove it"
      ) from error


class open_binary:  # noqa: N801 - used like the function open
  """Opens a file for reading bytes, decompressed; errors become `UserError`."""

  def __init__(self, path: str):
    self._path = path

  def __enter__(self) -> io.BufferedIOBase:
    try:
      raw = open(self._path, "rb")
    except OSError as error:
      raise self._user_error(error) from error
    if self._path.endswith(".gz"):
      self._stream = gzip.GzipFile(fileobj=raw)
    elif self._path.endswith(".zst"):
      self._stream = io.BufferedReader(_ZstdStream(raw, self._path))
    else:
      self._stream = raw
    self._raw = raw
    return self._stream

  def __exit__(self, kind, error, trace):
    self._stream.close()
    self._raw.close()
    if isinstance(error, (EOFError, zlib.error, OSError)):
      raise self._user_error(error) from error

  def _user_error(self, error: Exception) -> errors.UserError:
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
      return errors.UserError(
        f"{self._path}: truncated or corrupt ({error}); copy the file again"
      )
    cause = getattr(error, "strerror", None) or error
    return errors.UserError(
      f"{self._path}: cannot read ({cause}); check its permissions and the disk"
    )


class _ZstdStream(io.RawIOBase):
  """Decompresses frames and, unlike the library, notices a missing end."""

  def __init__(self, raw: io.BufferedIOBase, path: str):
    try:
      import zstandard
    except ImportError as error:
      raw.close()
      raise errors.UserError(
        f"{path} needs the zstandard library: pip install 'memcomp[text]'"
      ) from error
    self._library = zstandard
    self._raw = raw
    self._frame = None
    self._input = b""
    self._output = b""

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    while not self._output:
      self._input = self._input or self._raw.read(1 << 17)
      if not self._input:
        if self._frame is not None:
          raise EOFError("the last frame has no end")
        return 0
      if self._frame is None:
        self._frame = self._library.ZstdDecompressor().decompressobj()
      try:
        self._output = self._frame.decompress(self._input)
      except self._library.ZstdError as error:
        raise EOFError(str(error)) from error
      self._input = b""
      if self._frame.eof:
        self._input = self._frame.unused_data
        self._frame = None
    size = min(len(buffer), len(self._output))
    buffer[:size] = self._output[:size]
    self._output = self._output[size:]
    return size


def _check_utf8(path: str, content: bytes, first_line: int = 1):
  try:
    content.decode()
  except UnicodeDecodeError as error:
    line = first_line + content.count(b"\n", 0, error.start)
    raise errors.UserError(
      f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}); convert "
      "the file, for example with iconv -t UTF-8"
    ) from error


def _find_glob(pattern: str) -> list[TextFile]:
  parts = pathlib.PurePath(pattern).parts
  fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
  base = os.path.join("", *parts[:fixed])
  matches = glob.glob(pattern, recursive=True)
  found = [
    TextFile(os.path.relpath(path, base or "."), path)
    for path in matches
    if os.path.isfile(path) and _is_text(path)
  ]
  if not found:
    raise errors.UserError(
      f"{pattern}: matches no text file; check the pattern (extensions "
      f"{', '.join(EXTENSIONS)}, also .gz or .zst)"
    )
  return sorted(found, key=lambda file: file.name)


def _find_stdlib() -> list[TextFile]:
  root = sysconfig.get_paths()["stdlib"]
  found = [
    file
    for file in _walk(root, _NOT_LIBRARY)
    if file.name.endswith(".py")
    and not file.name.startswith("_sysconfigdata")
    and _is_utf8(file.path)
  ]
  if not found:
    raise errors.UserError(
      f"source stdlib: no library sources in {root}; install the interpreter "
      "with its sources, or set data.source to text files"
    )
  return found


def _is_utf8(path: str) -> bool:
  try:
    pathlib.Path(path).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError):
    return False
  return True


def _walk(root: str, skip: set[str] | None = None) -> list[TextFile]:
  found = []
  for folder, folders, files in os.walk(root):
    folders[:] = [
      name
      for name in folders
      if not name.startswith(".") and name not in (skip or ())
    ]
    for name in files:
      path = os.path.join(folder, name)
      if not name.startswith(".") and _is_text(path):
        relative = os.path.relpath(path, root).replace(os.sep, "/")
        found.append(TextFile(relative, path))
  return sorted(found, key=lambda file: file.name)


def _is_text(path: str) -> bool:
  return any(path.endswith(e + c) for e in EXTENSIONS for c in COMPRESSIONS)
