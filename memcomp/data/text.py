"""Reads the documents of text files."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from memcomp import errors
from memcomp.data.files import TextFile

_ZSTD_WINDOW = 1 << 31
"""Maximum distance of a match in bytes: that of zstd --long=31, the largest.
The library's default is 2^27."""


def text_of(where: str, record: Any) -> bytes:
  """Returns the field "text" of a JSON line as UTF-8.

  Args:
    where: file and line, for messages.
    record: the parsed line.

  Raises:
    UserError: there is none.
  """
  if not isinstance(record, dict) or not isinstance(record.get("text"), str):
    raise errors.UserError(
      f'{where}: no field "text" holding a string; each line must '
      'be an object such as {"text": "..."}'
    )
  try:
    return record["text"].encode()
  except UnicodeEncodeError as error:
    raise errors.UserError(
      f'{where}: "text" has half of a surrogate pair, which has no '
      "UTF-8 form; remove it"
    ) from error


def documents(
  file: TextFile, parse: Callable[[str, Any], Any] = text_of
) -> Iterator[tuple[int, Any]]:
  """Reads the documents of a file.

  Args:
    file: the file.
    parse: maps a line's place and its JSON to the content, for .jsonl.

  Yields:
    (line, content): the line number from 1 for .jsonl, else 0 and the file's
    bytes, which are valid UTF-8.

  Raises:
    UserError: unreadable, truncated, not UTF-8 or not JSON; with the line.
  """
  with open_binary(file.path) as stream:
    if file.is_jsonl:
      yield from json_lines(file.path, enumerate(stream, 1), parse)
    else:
      content = stream.read()
      _check_utf8(file.path, content)
      yield 0, content


def json_lines(
  path: str,
  lines: Iterator[tuple[int, bytes]],
  parse: Callable[[str, Any], Any] = text_of,
) -> Iterator[tuple[int, Any]]:
  """Parses numbered JSON lines, see `documents`; skips blank lines."""
  for number, line in lines:
    _check_utf8(path, line, number)
    if line.isspace():
      continue
    try:
      record = json.loads(line.decode())
    except errors.BAD_JSON as error:
      raise errors.UserError(
        f"{path}:{number}: invalid JSON ({error}); each line must be an object"
      ) from error
    yield number, parse(f"{path}:{number}", record)


class open_binary:  # noqa: N801 - used like the function open
  """Opens a file as decompressed bytes; errors become `UserError`."""

  def __init__(self, path: str):
    self._path = path

  def __enter__(self) -> io.BufferedIOBase:
    try:
      raw = open(self._path, "rb")
    except OSError as error:
      raise self._user_error(error) from error
    if self._path.lower().endswith(".gz"):
      self._stream = gzip.GzipFile(fileobj=raw)
    elif self._path.lower().endswith(".zst"):
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
  """Decompresses frames and, unlike the library, detects a missing end."""

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
        self._frame = self._library.ZstdDecompressor(
          max_window_size=_ZSTD_WINDOW
        ).decompressobj()
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
