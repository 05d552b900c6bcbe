"""Tokenizers: raw bytes, or a tokenizer.json with the tokenizers library."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from memcomp import errors, paths
from memcomp.data import byte_table

NONE = "none"
"""Name of `NoTokenizer`."""

WITHOUT_FILE = ("bytes", NONE)
"""Names that are not paths."""

MAX_VOCAB = 1 << 24
"""Maximum number of ids; each has a table entry."""

_ENDS = (
  "<|endoftext|>",
  "<|end_of_text|>",
  "</s>",
  "<eos>",
  "<|eos|>",
  "<|im_end|>",
  "<|eot_id|>",
)
"""Special tokens that end a text, the most reliable first."""


class Tokenizer(Protocol):
  """Converts text to ids and back.

  Attributes:
    name: the argument of `load`.
    vocab_size: ids are in [0, vocab_size).
    dtype: smallest unsigned type that holds every id.
    fingerprint: 16 hex digits; equal for tokenizers that give equal ids.
    ends: special tokens that end a text, in order of preference.
  """

  name: str
  vocab_size: int
  dtype: np.dtype
  fingerprint: str
  ends: tuple[int, ...]

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of `text`, `[tokens]` of `dtype`, no special tokens."""
    ...

  def encode_bytes(self, text: bytes) -> np.ndarray:
    """Returns the ids of UTF-8 `text`."""
    ...

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of `ids`; invalid UTF-8 becomes U+FFFD."""
    ...

  def token_bytes(self, token: int) -> bytes:
    """Returns the bytes that one token adds to a text."""
    ...

  def bytes_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the number of bytes of each id, int32 in the shape of `ids`.

    These are the bytes that a token spells, except for `Ids`: there they are
    shares that sum to the text's bytes.
    """
    ...


class Ids(np.ndarray):
  """The ids of a whole text that do not spell it, with its length in bytes.

  Unknown words, special tokens, a normalizer or a prefix space cause this.
  Slices and copies are not of a whole text, so they have no length.
  """

  text_bytes: int | None = None


class ByteTokenizer:
  """256 ids, one for each byte."""

  def __init__(self):
    self.name = "bytes"
    self.vocab_size = 256
    self.dtype = np.dtype(np.uint8)
    self.fingerprint = _digest(b"bytes")
    self.ends = ()

  def encode(self, text: str) -> np.ndarray:
    """See `Tokenizer.encode`."""
    return self.encode_bytes(_utf8(text))

  def encode_bytes(self, text: bytes) -> np.ndarray:
    """See `Tokenizer.encode_bytes`."""
    return np.frombuffer(text, np.uint8)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """See `Tokenizer.decode`."""
    # bytes() rejects an id above 255, while astype would wrap it.
    return bytes(np.asarray(ids).reshape(-1).tolist()).decode(errors="replace")

  def token_bytes(self, token: int) -> bytes:
    """See `Tokenizer.token_bytes`."""
    return bytes([token])

  def bytes_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """See `Tokenizer.bytes_of`."""
    return np.ones(np.shape(ids), np.int32)


class JsonTokenizer:
  """A tokenizer.json of the tokenizers library.

  Attributes:
    content: contents of the file.
  """

  def __init__(self, path: str):
    try:
      import tokenizers
    except ImportError as error:
      raise errors.UserError(
        f"tokenizer {path!r} needs the tokenizers library: "
        "pip install 'memcomp[text]'"
      ) from error
    content = _read(path)
    with _library_errors(
      f"{path}: not a tokenizer.json",
      "write one with tokenizers.Tokenizer.save",
    ):
      self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
      spec = json.loads(content)
    # Texts are encoded completely and deterministically, whatever the file's
    # settings are.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    if getattr(self._tokenizer.model, "dropout", None) is not None:
      self._tokenizer.model.dropout = None
    vocab = self._tokenizer.get_vocab(with_added_tokens=True)
    self.name = path
    self.content = content
    # Not the number of entries, because ids may have gaps.
    self.vocab_size = max(vocab.values(), default=-1) + 1
    if not self.vocab_size:
      raise errors.UserError(
        f"{path}: the vocabulary is empty; train the tokenizer first"
      )
    if self.vocab_size > MAX_VOCAB:
      raise errors.UserError(
        f"{path}: ids go up to {self.vocab_size - 1}, beyond the {MAX_VOCAB}"
        " that are possible; number them without gaps"
      )
    self.dtype = np.min_scalar_type(self.vocab_size - 1)
    self.fingerprint = _digest(content)
    decoder = self._tokenizer.decoder
    with _library_errors(
      f"{path}: its decoder does not make text of one token at a time",
      "save it with another decoder",
    ):
      self._bytes = byte_table.make(
        spec, vocab, self.vocab_size, decoder.decode if decoder else " ".join
      )
    self._num_bytes = np.array([len(b) for b in self._bytes], np.int32)
    self.special = {
      added["content"]: added["id"]
      for added in spec.get("added_tokens") or ()
      if added["special"]
    }
    names = filter(self.special.__contains__, _ENDS)
    self.ends = tuple(self.special[name] for name in names)

  def encode(self, text: str) -> np.ndarray:
    """See `Tokenizer.encode`; returns `Ids` if they do not spell the text."""
    size = len(_utf8(text))
    with _library_errors(
      f"{self.name}: the tokenizer cannot encode a text",
      "give its vocabulary a token for what is unknown",
    ):
      found = self._tokenizer.encode(text, add_special_tokens=False).ids
    ids = np.array(found, self.dtype)
    if len(ids) and self._num_bytes[ids].sum(dtype=np.int64) != size:
      ids = ids.view(Ids)
      ids.text_bytes = size
    return ids

  def encode_bytes(self, text: bytes) -> np.ndarray:
    """See `Tokenizer.encode_bytes`."""
    return self.encode(text.decode())

  def decode(
    self, ids: Sequence[int] | np.ndarray, *, special: bool = False
  ) -> str:
    """See `Tokenizer.decode`; `special` includes names of special tokens."""
    return self._tokenizer.decode(
      np.asarray(ids).reshape(-1).tolist(), skip_special_tokens=not special
    )

  def token_bytes(self, token: int) -> bytes:
    """See `Tokenizer.token_bytes`."""
    return self._bytes[token]

  def bytes_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """See `Tokenizer.bytes_of`."""
    sizes = self._num_bytes[np.asarray(ids)]
    total = getattr(ids, "text_bytes", None)
    if total is None:
      return sizes
    ends = np.cumsum(weights(sizes), dtype=np.float64)
    return np.diff(np.rint(ends * (total / ends[-1])), prepend=0).astype(
      np.int32
    )


def weights(sizes: np.ndarray) -> np.ndarray:
  """Returns the weights by which tokens share a text's bytes.

  A token that spells nothing, such as an unknown word, counts as one byte.
  """
  return np.maximum(sizes, 1)


def bits_per_byte(nats: float, num_bytes: float) -> float | None:
  """Returns bits per byte for a total in nats.

  None for no bytes, because that is not a result.
  """
  return nats / num_bytes / math.log(2) if num_bytes else None


def measure(tokenizer: Tokenizer, ids: np.ndarray) -> tuple[int, int, int]:
  """Returns byte counts of a whole text, for `store.sizes_of`.

  Args:
    tokenizer: tokenizer of `ids`.
    ids: result of `encode`.

  Returns:
    Bytes of the text, of the tokens' `weights`, and those that they spell.
  """
  if isinstance(tokenizer, ByteTokenizer):
    return len(ids), len(ids), len(ids)
  sizes = tokenizer.bytes_of(np.asarray(ids))
  spelled = int(sizes.sum(dtype=np.int64))
  size = getattr(ids, "text_bytes", None)
  weight = int(weights(sizes).sum(dtype=np.int64))
  return spelled if size is None else size, weight, spelled


class NoTokenizer:
  """For models whose ids stand for no text; everything about text fails."""

  def __init__(self):
    self.name = NONE
    self.vocab_size = 0
    self.dtype = np.dtype(np.int32)
    self.fingerprint = _digest(NONE.encode())
    self.ends = ()

  def encode(self, text: str) -> np.ndarray:
    """Raises UserError, like all methods below except `bytes_of`."""
    raise self._error()

  def encode_bytes(self, text: bytes) -> np.ndarray:
    """See `encode`."""
    raise self._error()

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """See `encode`."""
    raise self._error()

  def token_bytes(self, token: int) -> bytes:
    """See `encode`."""
    raise self._error()

  def bytes_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Counts each id as one byte; int32 in the shape of `ids`."""
    return np.ones(np.shape(ids), np.int32)

  def _error(self) -> errors.UserError:
    return errors.UserError(
      "data.tokenizer is none: the model's ids stand for no text, as those of a"
      " synthetic task; evaluate it with --task=NAME of that task, or give a"
      " tokenizer to what is trained on text"
    )


def load(name: str) -> Tokenizer:
  """Opens a tokenizer.

  Args:
    name: "bytes", the path of a tokenizer.json, or "none".

  Returns:
    The tokenizer.

  Raises:
    UserError: no such file, not a tokenizer.json, or the library is missing.
  """
  if name == "bytes":
    return ByteTokenizer()
  if name == NONE:
    return NoTokenizer()
  path = paths.expand(name)
  if not name.endswith(".json") and not os.path.exists(path):
    raise errors.UserError(
      f"unknown tokenizer {name!r}: give bytes or the path of a tokenizer.json"
    )
  return JsonTokenizer(path)


def _read(path: str) -> bytes:
  try:
    return paths.of(path).read_bytes()
  except (OSError, ValueError) as error:  # ValueError for a null byte
    cause = getattr(error, "strerror", None) or error
    raise errors.UserError(
      f"cannot read tokenizer {path}: {cause}; give bytes or the path of a"
      " tokenizer.json"
    ) from error


def take_ends(tokenizer: Tokenizer, meta: dict[str, Any]) -> None:
  """Gives a tokenizer the "ends" of a model's metadata, if it has them.

  Raises:
    ValueError: they are no ids of the tokenizer.
  """
  if "ends" in meta:
    ends = tuple(map(int, meta["ends"]))
    if not all(0 <= end < tokenizer.vocab_size for end in ends):
      raise ValueError(f"ends={ends} of {tokenizer.vocab_size} tokens")
    tokenizer.ends = ends


@contextlib.contextmanager
def _library_errors(what: str, fix: str) -> Iterator[None]:
  """Turns all errors of the library into a `UserError`.

  It raises bare Exception, and BaseException if its Rust code panics.
  """
  try:
    yield
  except (KeyboardInterrupt, errors.Terminated, SystemExit, MemoryError):
    raise
  except BaseException as error:
    raise errors.UserError(f"{what} ({_one_line(error)}); {fix}") from error


def _utf8(text: str) -> bytes:
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    code = ord(text[error.start])
    if 0xDC80 <= code <= 0xDCFF:  # how Python reads a byte that is no UTF-8
      raise errors.UserError(
        f"character {error.start} of the text is the byte {code - 0xDC00:#x},"
        " which is not UTF-8, or half of a surrogate pair; convert the text"
      ) from error
    raise errors.UserError(
      f"character {error.start} of the text is half of a surrogate pair, which "
      "has no UTF-8 form; remove it"
    ) from error


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _one_line(error: BaseException) -> str:
  return " ".join(str(error).split())
