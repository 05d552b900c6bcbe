"""Flat token files (.bin): consecutive little-endian ids.

A sidecar `<file>.json` may contain {"dtype": "uint16" or "uint32",
"vocab_size": ..., "offsets": [0, ..., num_tokens]}. Each entry is optional;
`offsets` are the starts of documents, and the end. The default is uint16 and
one document.
"""

import json
import os
from typing import Any

import numpy as np

from memcomp import errors
from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp_kernels.options import is_a

_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHECKED = 1 << 20  # tokens at either end to check when opening a file


class TokenFileStore:
  """A memory-mapped flat token file."""

  def __init__(self, path: str, tokenizer: tokenizer_lib.Tokenizer):
    """Opens a file.

    Args:
      path: path of the .bin file.
      tokenizer: tokenizer of its ids.

    Raises:
      UserError: unreadable, of the wrong size, or ids outside the vocabulary.
    """
    if not tokenizer.vocab_size:
      raise errors.UserError(
        f"{path}: data.tokenizer=none has no vocabulary; set it to the"
        " tokenizer that the file was made with"
      )
    spec, sidecar = _read_sidecar(path)
    dtype = np.dtype(_DTYPES[spec.get("dtype", "uint16")])
    size = _size(path, dtype)
    offsets = _offsets(path, spec.get("offsets", [0, size]), size)
    self.name = path
    self.vocab_size = min(
      tokenizer.vocab_size, spec.get("vocab_size", tokenizer.vocab_size)
    )
    try:
      self._tokens = np.memmap(path, dtype, mode="r")
    except OSError as error:
      raise _unreadable(path, error) from error
    lengths = np.diff(offsets)
    documents = np.flatnonzero(lengths)
    self.lengths = lengths[documents].astype(np.int64)
    self.num_tokens = size
    self.sizes = None
    self.scored = None
    self.names = [
      store_lib.document_name(os.path.basename(path), int(i) + 1)
      for i in documents
    ]
    self._start = offsets[documents]
    for start in (0, max(0, size - _CHECKED)):
      self._checked(start, min(start + _CHECKED, size))
    # Not of all tokens, because the file may be larger than memory.
    ends = (self._tokens[:_CHECKED], self._tokens[-_CHECKED:])
    self.fingerprint = store_lib.digest(sidecar, str(size), *ends)

  def read(self, document: int, start: int, stop: int) -> np.ndarray:
    """See `TokenStore.read`; raises UserError for an id that is too large."""
    first = int(self._start[document])
    return self._checked(first + start, first + stop)

  def _checked(self, start: int, stop: int) -> np.ndarray:
    tokens = self._tokens[start:stop]
    if tokens.size and tokens.max() >= self.vocab_size:
      place = start + int(np.argmax(tokens >= self.vocab_size))
      raise errors.UserError(
        f"{self.name}: token {place} is {self._tokens[place]}, outside the "
        f"vocabulary of {self.vocab_size}; set data.tokenizer to the one it "
        "was made with, and dtype in its .json sidecar"
      )
    return tokens.astype(np.int32)


def _size(path: str, dtype: np.dtype) -> int:
  """Returns the number of tokens in the file."""
  try:
    size = os.path.getsize(path)
  except OSError as error:
    raise _unreadable(path, error) from error
  if not size:
    raise errors.UserError(f"{path}: the file is empty; write it again")
  if size % dtype.itemsize:
    raise errors.UserError(
      f"{path}: {size} bytes are no multiple of the {dtype.itemsize} of "
      f"{dtype.name}; set dtype in {path}.json, or copy the file again"
    )
  return size // dtype.itemsize


def _offsets(path: str, listed: Any, size: int) -> np.ndarray:
  """Returns `listed` as int64 `[documents + 1]`."""
  try:
    offsets = np.array(listed)
  except ValueError:  # lists of unequal lengths
    offsets = np.zeros(0)
  sound = (
    offsets.ndim == 1
    and offsets.dtype.kind == "i"
    and len(offsets) > 1
    and offsets[0] == 0
    and offsets[-1] == size
    and (np.diff(offsets) >= 0).all()
  )
  if not sound:
    raise errors.UserError(
      f"{path}.json: offsets must rise from 0 to the number of tokens, {size}"
    )
  return offsets


def _read_sidecar(path: str) -> tuple[dict[str, Any], str]:
  sidecar = f"{path}.json"
  if not os.path.exists(sidecar):
    return {}, ""
  try:
    with open(sidecar, encoding="utf-8") as stream:
      content = stream.read()
    spec = json.loads(content)
  except OSError as error:
    raise _unreadable(sidecar, error) from error
  except errors.BAD_JSON as error:
    raise errors.UserError(
      f"{sidecar}: invalid JSON ({error}); correct or delete it"
    ) from error
  dtypes = tuple(_DTYPES)
  if not isinstance(spec, dict) or spec.get("dtype", "uint16") not in dtypes:
    raise errors.UserError(
      f'{sidecar}: must be an object whose "dtype" is uint16 or uint32'
    )
  vocab_size = spec.get("vocab_size", 1)
  if not is_a(vocab_size, int) or vocab_size < 1:
    raise errors.UserError(f'{sidecar}: "vocab_size" must be a whole number')
  return spec, content


def _unreadable(path: str, error: OSError) -> errors.UserError:
  return errors.UserError(
    f"{path}: cannot read ({error.strerror or error}); check its permissions"
  )
