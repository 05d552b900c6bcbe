"""The work of `memcomp.data.prepare`: cuts a corpus into units and writes them.

A unit is some files, or a range of lines of a long .jsonl. The cuts depend only
on the corpus, and one process writes each unit, so the result does not depend
on the number of workers. A unit is done once its index (`units/00012.json`,
written last) exists.
"""

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_module

from memcomp import errors
from memcomp.data import chat_template, formats, shards, text
from memcomp.data import files as files_lib
from memcomp.data import tokenizer as tokenizer_lib

UNITS = "units"
TEMPORARY = ".tmp"
RECORD_TOKENS = 1 << 14

# Grain requires one record per group.
_WRITER_OPTIONS = "group_size:1,zstd:3"


@dataclasses.dataclass(frozen=True)
class Part:
  """A file, or whole lines of it.

  Attributes:
    file: index into the corpus.
    start: first byte.
    stop: end, exclusive; -1 is the end of the file.
    line: number of the first line, from 1.
  """

  file: int
  start: int = 0
  stop: int = -1
  line: int = 1


@dataclasses.dataclass(frozen=True)
class Unit:
  """A piece of work.

  Attributes:
    number: index in the corpus, from 0.
    parts: parts to read.
    size: bytes on disk, to estimate the remaining time.
  """

  number: int
  parts: tuple[Part, ...]
  size: int


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus and its output.

  Attributes:
    files: the text.
    out: folder for the shards.
    tokenizer: argument of `tokenizer.load`.
    shard_tokens: maximum tokens per shard.
    record_tokens: tokens per record.
    format: argument of `formats.load`.
    chat_template: argument of `formats.load`.
  """

  files: tuple[files_lib.TextFile, ...]
  out: str
  tokenizer: str
  shard_tokens: int
  record_tokens: int
  format: str = "text"
  chat_template: str = chat_template.CHATML


def cut(files: Sequence[files_lib.TextFile], unit_size: int) -> list[Unit]:
  """Cuts a corpus into units of at most `unit_size` bytes, if possible."""
  units: list[Unit] = []
  parts: list[Part] = []
  total = 0

  def close():
    nonlocal total
    if parts:
      units.append(Unit(len(units), tuple(parts), total))
    parts.clear()
    total = 0

  for number, file in enumerate(files):
    size = os.path.getsize(file.path)
    if size > unit_size and file.extension == ".jsonl":
      close()
      for part, length in _cut_lines(file, number, unit_size):
        parts.append(part)
        total = length
        close()
      continue
    if total + size > unit_size:
      close()
    parts.append(Part(number))
    total += size
  close()
  return units


def _cut_lines(
  file: files_lib.TextFile, number: int, unit_size: int
) -> Iterator[tuple[Part, int]]:
  """Yields the parts of a .jsonl and their sizes, cut at line ends."""
  start, line = 0, 1
  with text.open_binary(file.path) as stream:
    while content := stream.read(unit_size):
      content += stream.readline()
      stop = start + len(content)
      yield Part(number, start, stop, line), len(content)
      start, line = stop, line + content.count(b"\n")


def write(
  corpus: Corpus,
  unit: Unit,
  tokenizer: tokenizer_lib.Tokenizer,
  progress: Callable[[int], None],
) -> None:
  """Writes the shards and the index of a unit, each file by one rename.

  Args:
    corpus: corpus of the unit.
    unit: the unit.
    tokenizer: the corpus's tokenizer, loaded.
    progress: called with the number of tokens after each document.

  Raises:
    UserError: the text cannot be read, or the disk cannot be written.
  """
  with disk_errors(corpus.out):
    _write(corpus, unit, tokenizer, progress)


@contextlib.contextmanager
def disk_errors(out: str) -> Iterator[None]:
  """Turns errors of writing to `out` into `UserError`."""
  try:
    yield
  except (OSError, RuntimeError) as error:  # RuntimeError from array_record
    raise errors.UserError(
      f"{out}: cannot write ({' '.join(str(error).split())}); check free space "
      "and permissions, then run the same command again"
    ) from error


def _write(corpus, unit, tokenizer, progress):
  lengths, files, lines, sizes, counts, spans = [], [], [], [], [], []
  format = formats.load(corpus.format, corpus.chat_template, tokenizer)
  writer = _Writer(corpus, unit, tokenizer.dtype)
  for part in unit.parts:
    path = corpus.files[part.file].path
    for line, content in _documents(corpus, part, format):
      found = format.encode(f"{path}:{line}", content)
      size = len(found.ids)
      if size:
        writer.write(found.ids)
        lengths.append(size)
        files.append(part.file)
        lines.append(line)
        sizes.append(found.size)
        counts.append(len(found.spans))
        spans += found.spans
        progress(size)
  answers = {}
  if format.template:
    answers["counts"] = np.array(counts, np.int64)
    answers["spans"] = np.array(spans, np.int64).reshape(-1, 2)
  index = {"tokens": sum(lengths), "shards": writer.close()}
  save_arrays(
    index_path(corpus.out, unit, ".npz"),
    lengths=np.array(lengths, np.int64),
    file_number=np.array(files, np.int32),
    line=np.array(lines, np.int64),
    sizes=np.array(sizes, np.int64).reshape(-1, 3),
    **answers,
  )
  save_json(index_path(corpus.out, unit, ".json"), index)


def _documents(
  corpus: Corpus, part: Part, format: formats.Format
) -> Iterator[tuple[int, Any]]:
  file = corpus.files[part.file]
  if part.stop < 0:
    yield from text.documents(file, format.parse)
    return
  with text.open_binary(file.path) as stream:
    stream.seek(part.start)
    content = stream.read(part.stop - part.start)
  # Not splitlines, which also cuts at carriage returns.
  lines = enumerate(io.BytesIO(content), part.line)
  yield from text.json_lines(file.path, lines, format.parse)


class _Writer:
  """Cuts a stream of tokens into records, and records into shards."""

  def __init__(self, corpus: Corpus, unit: Unit, dtype: np.dtype):
    self._folder = corpus.out
    self._prefix = f"tokens-{unit.number:05d}"
    self._dtype = dtype.newbyteorder("<")
    self._record_tokens = corpus.record_tokens
    self._shard_records = max(1, corpus.shard_tokens // corpus.record_tokens)
    self._parts: list[np.ndarray] = []
    self._waiting = 0
    self._writer = None
    self._records = 0
    self._shards: list[dict[str, Any]] = []

  def write(self, ids: np.ndarray):
    self._parts.append(ids)
    self._waiting += len(ids)
    if self._waiting >= self._record_tokens:
      tokens = np.concatenate(self._parts)
      whole = len(tokens) // self._record_tokens * self._record_tokens
      for start in range(0, whole, self._record_tokens):
        self._record(tokens[start : start + self._record_tokens])
      self._parts = [tokens[whole:]]
      self._waiting = len(tokens) - whole

  def close(self) -> list[dict[str, Any]]:
    """Finishes the last shard; returns the entries for the manifest."""
    if self._waiting:
      self._record(np.concatenate(self._parts))
    self._finish_shard()
    return self._shards

  def _record(self, tokens: np.ndarray):
    if self._writer is None:
      name = f"{self._prefix}-{len(self._shards):03d}.arrayrecord"
      self._path = os.path.join(self._folder, name)
      self._writer = array_record_module.ArrayRecordWriter(
        self._path + TEMPORARY, _WRITER_OPTIONS
      )
    self._writer.write(tokens.astype(self._dtype).tobytes())
    self._records += 1
    if self._records == self._shard_records:
      self._finish_shard()

  def _finish_shard(self):
    if self._writer is None:
      return
    self._writer.close()
    self._writer = None
    _publish(self._path)
    self._shards.append(entry(self._path, records=self._records))
    self._records = 0


def read_index(out: str, unit: Unit) -> dict[str, Any] | None:
  """Returns the index of a unit; None if it is not done, or damaged."""
  try:
    with open(index_path(out, unit, ".json"), encoding="utf-8") as stream:
      index = json.load(stream)
  except (OSError, *errors.BAD_JSON):
    return None
  match index:
    case {"tokens": int(), "shards": [*shards]} if all(map(_is_entry, shards)):
      return index
  return None


def _is_entry(found: Any) -> bool:
  """Whether this is a shard's `entry`."""
  match found:
    case {"file": str(), "bytes": int(), "sha256": str(), "records": int()}:
      return True
  return False


def index_path(out: str, unit: Unit, extension: str) -> str:
  """Returns the path of a unit's index."""
  return os.path.join(out, UNITS, f"{unit.number:05d}{extension}")


def index_names(unit: Unit) -> list[str]:
  """Returns the index files of a unit under `out`, in order of writing."""
  return [index_path("", unit, extension) for extension in (".npz", ".json")]


def entry(path: str, **more: Any) -> dict[str, Any]:
  """Returns the manifest entry of a file."""
  return {
    "file": os.path.basename(path),
    "bytes": os.path.getsize(path),
    "sha256": shards.sha256(path),
    **more,
  }


def save_json(path: str, content: Any) -> None:
  """Writes JSON by one rename."""
  with open(path + TEMPORARY, "w", encoding="utf-8") as stream:
    json.dump(content, stream, sort_keys=True)
  _publish(path)


def save_arrays(path: str, **arrays: np.ndarray) -> None:
  """Writes an .npz by one rename."""
  with open(path + TEMPORARY, "wb") as stream:
    np.savez_compressed(stream, allow_pickle=False, **arrays)
  _publish(path)


def _publish(path: str):
  """Renames a finished file after flushing it to disk."""
  descriptor = os.open(path + TEMPORARY, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
  os.replace(path + TEMPORARY, path)
