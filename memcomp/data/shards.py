"""Reads the folder of ArrayRecord shards that `memcomp.data.prepare` writes.

The corpus is cut into units. The tokens of a unit are one stream, cut into
records of `record_tokens` regardless of documents, so reading a row touches one
or two records. Beside the shards:

- manifest.json: counts, and size and SHA-256 of every other file;
- documents.npz: for each document `lengths`, `file_number` (index into the
manifest's files) and `line`. If tokens do not spell the text, also `sizes`
(`tokenizer.measure` of each, or of its answers). Of conversations, also the
answers: `counts` and `spans` (see `store.Scored`).
"""

import functools
import hashlib
import itertools
import json
import os
import resource
from typing import Any

import numpy as np
from array_record.python import array_record_module

from memcomp import errors, paths
from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib

MANIFEST = "manifest.json"
PLAN = "plan.json"  # written first; the manifest is written last
DOCUMENTS = "documents.npz"
FORMAT = 1
FORMAT_MESSAGES = 2
"""Conversations; versions that do not know them must not read them as text."""

_OPEN_SHARDS = 256
_SHARE_OF_FILES = 4
"""One out of this many files that a process may open is for shards."""
_CACHED_RECORDS = 256  # records of 16,384 tokens: at most 16 MiB


class ShardStore:
  """Documents in shards; the module describes the format.

  Attributes:
    chat_template: fingerprint of the conversations' template; None for text.
  """

  def __init__(self, folder: str, tokenizer: tokenizer_lib.Tokenizer):
    """Opens a folder; checks sizes, but reads no tokens.

    Args:
      folder: --out of prepare, or its copy in a bucket.
      tokenizer: must be the tokenizer of prepare.

    Raises:
      UserError: missing or broken files, or another tokenizer.
    """
    content, manifest = read_manifest(folder)
    self.name = folder
    self.fingerprint = store_lib.digest(content)
    self._serial = next(_serials)
    with errors.malformed(
      os.path.join(folder, MANIFEST),
      "run memcomp prepare again with the same --source and --out",
    ):
      self._open(manifest, tokenizer)
    self._record = functools.lru_cache(_CACHED_RECORDS)(self._read_record)

  def _open(
    self, manifest: dict[str, Any], tokenizer: tokenizer_lib.Tokenizer
  ) -> None:
    folder = self.name
    mine = manifest["tokenizer"]
    if mine["fingerprint"] != tokenizer.fingerprint:
      raise errors.UserError(
        f"{folder}: prepared with the tokenizer {mine['name']} "
        f"({mine['fingerprint']}), not {tokenizer.name} "
        f"({tokenizer.fingerprint}); set data.tokenizer to it"
      )
    # Bucket files would need a request each; readers count their records
    # anyway.
    if not paths.is_remote(folder):
      for entry in manifest["shards"]:
        check_file(folder, entry)
    documents = _read_documents(folder, manifest)
    self.lengths = documents["lengths"]
    self.num_tokens = int(self.lengths.sum())
    self.sizes = store_lib.sizes_of(documents.get("sizes", []))
    self.scored, self.chat_template = None, None
    if manifest["format"] == FORMAT_MESSAGES:
      self.chat_template = str(manifest["chat_template"])
      self.scored = store_lib.Scored(documents["counts"], documents["spans"])
    self.names = store_lib.DocumentNames(
      list(manifest["files"]), documents["file_number"], documents["line"]
    )
    self._shards = manifest["shards"]
    self._dtype = np.dtype(manifest["dtype"])
    self._record_tokens = int(manifest["record_tokens"])
    if self._record_tokens < 1:
      raise ValueError(f"record_tokens={self._record_tokens}")
    self._offsets = store_lib.offsets_of(self.lengths)
    units = np.array(manifest["unit_tokens"], np.int64)
    self._unit_start = store_lib.offsets_of(units)
    self._unit_records = store_lib.offsets_of(-(-units // self._record_tokens))
    records = np.array([shard["records"] for shard in self._shards])
    self._shard_records = store_lib.offsets_of(records)
    if (
      self._unit_start[-1] != self.num_tokens
      or self._shard_records[-1] != self._unit_records[-1]
    ):
      raise _corrupt(folder, "its counts contradict each other")

  def read(self, document: int, start: int, stop: int) -> np.ndarray:
    """See `TokenStore.read`; raises UserError for a corrupt record."""
    at = int(self._offsets[document]) + start
    # A document lies within one unit.
    unit = int(np.searchsorted(self._unit_start, at, side="right")) - 1
    at -= int(self._unit_start[unit])
    end = at + stop - start
    first = int(self._unit_records[unit])
    size = self._record_tokens
    result = np.empty(stop - start, np.int32)
    done = 0
    while at < end:
      record, offset = divmod(at, size)
      piece = self._record(first + record)[offset : offset + end - at]
      if not piece.size:
        raise _corrupt_shard(self.name, f"record {first + record} is short")
      result[done : done + piece.size] = piece
      done += piece.size
      at += piece.size
    return result

  def _read_record(self, record: int) -> np.ndarray:
    shard = int(np.searchsorted(self._shard_records, record, side="right")) - 1
    entry = self._shards[shard]
    path = os.path.join(self.name, entry["file"])
    reader = _reader(self._serial, path, entry["records"])
    number = record - int(self._shard_records[shard])
    try:
      content = reader.read([number])[0]
      return np.frombuffer(content, self._dtype)
    except (RuntimeError, ValueError, IndexError) as error:
      raise _corrupt_shard(path, f"record {number}: {error}") from error


_serials = itertools.count()


def _open_files() -> int:
  """Returns the maximum number of open shards over all stores."""
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY:
    return _OPEN_SHARDS
  return max(1, min(_OPEN_SHARDS, soft // _SHARE_OF_FILES))


@functools.lru_cache(_open_files())
def _reader(store: int, path: str, due: int) -> Any:
  """Opens a shard of the store with this serial number."""
  del store  # only for the cache: another store may have a file of this name
  try:
    reader = array_record_module.ArrayRecordReader(
      path, options="readahead_buffer_size:0", file_reader_buffer_size=1 << 15
    )
    records = reader.num_records()
  except RuntimeError as error:
    if reason := errors.reason(error):
      raise errors.UserError(f"{path}: {reason}") from error
    raise _corrupt_shard(path, str(error)) from error
  # A truncated file opens without an error, but has no records.
  if records != due:
    raise _corrupt_shard(path, f"{records} records where {due} are due")
  return reader


def read_manifest(folder: str) -> tuple[str, dict[str, Any]]:
  """Returns the text of a folder's manifest, and the manifest."""
  path = os.path.join(folder, MANIFEST)
  try:
    content = paths.of(path).read_text()
    manifest = json.loads(content)
  except OSError as error:
    raise errors.UserError(
      f"{path}: cannot read ({error.strerror or error}); run memcomp prepare"
    ) from error
  except errors.BAD_JSON as error:
    raise _corrupt(folder, str(error)) from error
  known = (FORMAT, FORMAT_MESSAGES)
  if not isinstance(manifest, dict) or manifest.get("format") not in known:
    raise _corrupt(folder, f'"format" is not {FORMAT} or {FORMAT_MESSAGES}')
  missing = {
    "tokenizer",
    "dtype",
    "record_tokens",
    "unit_tokens",
    "shards",
    "files",
    "documents",
  } - manifest.keys()
  if missing:
    raise _corrupt(folder, f"no {', '.join(sorted(missing))}")
  return content, manifest


def check_file(folder: str, entry: dict[str, Any], *, content: bool = False):
  """Raises UserError if a file differs from its entry in the manifest.

  Args:
    folder: folder of the file.
    entry: its `file`, `bytes` and `sha256`.
    content: whether to compare the SHA-256 too, which reads the whole file.
  """
  path = os.path.join(folder, entry["file"])
  try:
    size = paths.of(path).stat().length
  except OSError as error:
    raise _corrupt_shard(path, error.strerror or str(error)) from error
  if size != entry["bytes"]:
    raise _corrupt_shard(path, f"{size} bytes where {entry['bytes']} are due")
  if content and sha256(path) != entry["sha256"]:
    raise _corrupt_shard(path, "its SHA-256 is not the manifest's")


def sha256(path: str) -> str:
  """Returns the SHA-256 of a file in hexadecimal."""
  with paths.open_binary(path) as stream:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_documents(folder: str, manifest: dict[str, Any]) -> Any:
  # Unlike the shards, this file is small enough for a full read.
  check_file(folder, manifest["documents"], content=True)
  path = os.path.join(folder, DOCUMENTS)
  with paths.open_binary(path) as stream, np.load(stream) as archive:
    return dict(archive)


def _corrupt(folder: str, cause: str) -> errors.UserError:
  return errors.UserError(
    f"{os.path.join(folder, MANIFEST)}: corrupt ({cause}); run "
    "memcomp prepare again with the same --source and --out"
  )


def _corrupt_shard(path: str, cause: str) -> errors.UserError:
  return errors.UserError(
    f"{path}: missing or corrupt ({cause}); run memcomp prepare again "
    "with the same --source and --out, and --verify"
  )
