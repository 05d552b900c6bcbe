"""Opens the sources of `DataConfig`: text, token files and mixtures."""

import hashlib
import math
import os
import re
import sys
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from memcomp import errors, limits, paths
from memcomp.data import files as files_lib
from memcomp.data import (
  formats,
  packing,
  shards,
  text,
  token_file,
)
from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.data.synthetic import task as task_lib

if TYPE_CHECKING:  # memcomp.config imports the model; data stays light
  from memcomp import config as config_lib

SPLITS = ("train", "validation")

Split = store_lib.TokenStore | task_lib.Source


def open_split(
  data_config: "config_lib.DataConfig",
  split: str,
  *,
  tokenizer: tokenizer_lib.Tokenizer | None = None,
) -> Split:
  """Opens the documents of one split, or the rows of a task.

  Args:
    data_config: the source.
    split: "train" or "validation".
    tokenizer: the tokenizer, if it is already loaded.

  Returns:
    The tokens; a `store.Mixture` if the source has weights; a `task.Source` for
    a task.

  Raises:
    UserError: a bad setting, missing or broken data, or an empty split.
  """
  if split not in SPLITS:
    raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
  check(data_config)
  if data_config.task is not None:
    return task_lib.Source(
      data_config.task,
      split,
      seed=data_config.seed,
      length=data_config.sequence_length,
    )
  tokenizer = tokenizer or tokenizer_lib.load(data_config.tokenizer)
  format = format_of(data_config, tokenizer)
  if data_config.validation:
    name = "source" if split == "train" else "validation"
    source = getattr(data_config, name)
    return open_source(source, tokenizer, format=format, field=f"data.{name}")
  share = data_config.validation_share

  def keep(name: str) -> bool:
    return in_validation(name, share) == (split == "validation")

  store = open_source(data_config.source, tokenizer, format=format, keep=keep)
  if split == "validation" and len({*map(_is_text, _parts(store))}) > 1:
    print(
      "warning: data.source mixes prepared tokens and text files. A document in"
      " both may be in both splits. Give a separate text in data.validation",
      file=sys.stderr,
      flush=True,
    )
  return store


def format_of(
  data_config: "config_lib.DataConfig", tokenizer: tokenizer_lib.Tokenizer
) -> formats.Format:
  """Returns the format of a config's documents; raises UserError."""
  return formats.load(data_config.format, data_config.chat_template, tokenizer)


def open_text(
  data_config: "config_lib.DataConfig",
  split: str,
  *,
  tokenizer: tokenizer_lib.Tokenizer | None = None,
) -> store_lib.TokenStore:
  """Opens the documents of one split, see `open_split`.

  Raises:
    UserError: see `open_split`; or there is a task, which has no documents.
  """
  store = open_split(data_config, split, tokenizer=tokenizer)
  if isinstance(store, task_lib.Source):
    name = store.task.name
    raise errors.UserError(
      f"trained on rows of task {name}, not on text; evaluate it with"
      f" --task={name}"
    )
  return store


def in_validation(name: str, share: float) -> bool:
  """Whether a document belongs to the validation split.

  Args:
    name: name of the document, relative to its source.
    share: share of validation documents, in [0, 1).
  """
  value = hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8]
  return int.from_bytes(value, "big") < share * 2**64


def check(data_config: "config_lib.DataConfig") -> None:
  """Raises UserError if a setting is out of range."""
  c = data_config
  if c.packing not in packing.PACKINGS:
    raise errors.UserError(
      f"data.packing: unknown {c.packing!r}; use one of "
      f"{', '.join(packing.PACKINGS)}"
    )
  if c.stretch < 0:
    raise errors.UserError(
      f"data.stretch: must be 0 (off) or more windows, got {c.stretch}"
    )
  if c.stretch and c.packing != "stream":
    raise errors.UserError(
      f"data.stretch = {c.stretch} needs rows that read on, but data.packing ="
      f" {c.packing!r}; set data.packing to stream, or data.stretch to 0"
    )
  if c.sequence_length < 1:
    raise errors.UserError(
      f"data.sequence_length: must be at least 1, got {c.sequence_length}"
    )
  if not 0 <= c.validation_share < 1:
    raise errors.UserError(
      "data.validation_share: must be at least 0 and less than 1, got "
      f"{c.validation_share}"
    )
  limits.check("data.prefetch", c.prefetch, 0, limits.SIDE_BY_SIDE)
  formats.check(c.format, c.chat_template)
  if c.format == "messages" and c.task is None and c.packing == "joined":
    raise errors.UserError(
      "data.packing = 'joined' lets conversations read one another; set"
      " data.packing to first_fit, concat or stream for data.format = messages"
    )
  if c.task is not None:
    _check_task(c, c.task)


def _check_task(
  data_config: "config_lib.DataConfig", task: task_lib.TaskConfig
) -> None:
  """Raises UserError if a setting does not fit a task."""
  c = data_config
  try:
    task.validate()
  except ValueError as error:
    raise errors.UserError(f"data.task: {error}") from error
  for name, needed in (
    ("tokenizer", task.tokenizer),
    ("packing", "joined"),
    ("format", "text"),
  ):
    if getattr(c, name) != needed:
      raise errors.UserError(
        f"data.{name} = {getattr(c, name)!r}: the rows of task {task.name} are"
        f" laid as they are, of its own ids; set data.{name} to {needed}"
      )
  limits.check_seed("data.seed", c.seed)
  longest = max(task.lengths("train"))
  if c.sequence_length < longest:
    raise errors.UserError(
      f"data.sequence_length = {c.sequence_length}: rows of task {task.name}"
      f" take {longest} tokens; set data.sequence_length to {longest}"
    )


def open_source(
  source: str,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  format: formats.Format | None = None,
  keep: store_lib.Keep | None = None,
  field: str = "data.source",
) -> store_lib.TokenStore:
  """Opens a source in the syntax of `DataConfig.source`.

  Args:
    source: paths, or a weighted mixture of them.
    tokenizer: tokenizer for text; it must match that of stored tokens.
    format: format of the documents, with this tokenizer; None is text.
    keep: selects documents by name.
    field: the field or flag that holds the source, for errors.

  Raises:
    UserError: missing or broken data, malformed weights, or nothing kept.
  """
  format = format or formats.Text(tokenizer)
  if not is_mixture(source):
    return _open_list(source, format, keep, field=field)
  weights, parts = [], []
  names: dict[Hashable, str] = {}
  for part in source.split(";"):
    weight, path = parse_weight(part)
    weights.append(weight)
    parts.append(_open_list(path, format, keep, names, field=field))
  if min(weights) / sum(weights) == 0:
    raise errors.UserError(
      f"mixture: the smallest of the weights {weights} rounds to a share of 0;"
      " write numbers that are closer together"
    )
  return store_lib.Mixture(parts, weights)


def is_mixture(source: str) -> bool:
  """Whether a source has weights, as "0.7:pathA;0.3:pathB"."""
  return ";" in source or re.match(r"\s*[\d.]+:", source) is not None


def parse_weight(part: str) -> tuple[float, str]:
  """Splits "0.7:path" of a mixture; raises UserError for other text."""
  weight, colon, path = part.partition(":")
  try:
    value = float(weight)
  except ValueError:
    value = math.nan
  if not colon or not path.strip() or not 0 < value < math.inf:
    raise errors.UserError(
      f"mixture: {part!r} is not weight:path with a weight above 0; write "
      "0.7:pathA;0.3:pathB"
    )
  return value, path.strip()


def split_list(source: str, field: str = "data.source") -> list[str]:
  """Splits comma-separated paths, and expands ~ in each.

  Args:
    source: the paths.
    field: the field or flag that holds them, for the error.

  Raises:
    UserError: there are none.
  """
  found = [path.strip() for path in source.split(",") if path.strip()]
  if not found:
    raise errors.UserError(
      f"{field} is empty; set it to stdlib or to paths of text files"
    )
  return [paths.expand(path) for path in found]


def _open_list(
  source: str,
  format: formats.Format,
  keep: store_lib.Keep | None,
  names: dict[Hashable, str] | None = None,
  *,
  field: str,
) -> store_lib.TokenStore:
  """Opens comma-separated paths as one store, text after stored tokens."""
  left_out = False

  def noted(name: str) -> bool:
    nonlocal left_out
    kept = keep is None or keep(name)
    left_out |= not kept
    return kept

  chosen = keep and noted
  stored: dict[str, store_lib.TokenStore] = {}  # each place counts once
  texts: list[str] = []
  for path in split_list(source, field):
    place = os.path.realpath(path)
    if _holds(path, shards.MANIFEST):
      found = shards.ShardStore(path, format.tokenizer)
      _check_format(found, format)
      stored.setdefault(place, _keep(found, chosen))
    elif _holds(path, shards.PLAN):
      raise errors.UserError(
        f"{path}: memcomp prepare has not finished; run the same command again."
        f" If {shards.PLAN} is not of it, name the files, as {path}/*.txt"
      )
    elif paths.is_remote(path):
      raise errors.UserError(
        f"{path}: no {shards.MANIFEST} in it; from a bucket only shards are"
        " read, which memcomp prepare writes and gcloud storage cp copies"
      )
    elif path.endswith(".bin") and os.path.exists(path):
      if format.template:
        raise errors.UserError(
          f"{path}: a token file does not tell answers from questions; give"
          " .jsonl, or shards, for data.format = messages"
        )
      found = token_file.TokenFileStore(path, format.tokenizer)
      stored.setdefault(place, _keep(found, chosen))
    else:
      texts.append(path)
  stores = list(stored.values())
  if texts:
    files = files_lib.find_all(texts, names, field=field)
    stores.append(read_text(source, files, format, chosen))
  stores = [store for store in stores if store.num_tokens]
  if not stores:
    raise _nothing(source, left_out)
  return stores[0] if len(stores) == 1 else store_lib.Concatenation(stores)


def _check_format(store: shards.ShardStore, format: formats.Format) -> None:
  """Raises UserError if shards were prepared in another format."""
  mine = format.template and format.template.fingerprint
  if store.chat_template == mine:
    return
  if store.chat_template and mine:
    raise errors.UserError(
      f"{store.name}: prepared with another chat template"
      f" ({store.chat_template}, not {mine}); set data.chat_template to it"
    )
  theirs = "messages" if store.chat_template else "text"
  raise errors.UserError(
    f"{store.name}: prepared from {theirs}; set data.format to {theirs}"
  )


def _parts(store: store_lib.TokenStore) -> list[store_lib.TokenStore]:
  if isinstance(store, store_lib.Concatenation):
    return [part for each in store.stores for part in _parts(each)]
  return [store]


def _is_text(store: store_lib.TokenStore) -> bool:
  return isinstance(store, store_lib.ArrayStore)


def _holds(path: str, name: str) -> bool:
  return paths.of(os.path.join(path, name)).exists()


def _nothing(source: str, left_out: bool) -> errors.UserError:
  if not left_out:
    return errors.UserError(f"{source}: no text in it; give files with text")
  return errors.UserError(
    f"{source}: too few documents for both training and validation; give more,"
    " change data.validation_share, or name text of its own in data.validation"
  )


def read_text(
  name: str,
  files: Sequence[files_lib.TextFile],
  format: formats.Format,
  keep: store_lib.Keep | None = None,
) -> store_lib.ArrayStore:
  """Tokenizes text files into one array in memory; skips empty documents."""
  format.check(files)
  parts, lengths, sizes, counts, spans = [], [], [], [], []
  for file in files:
    if not file.is_jsonl and keep and not keep(file.name):
      continue
    for line, content in text.documents(file, format.parse):
      if line and keep and not keep(store_lib.document_name(file.name, line)):
        continue
      found = format.encode(f"{file.path}:{line}", content)
      if len(found.ids):
        parts.append(found.ids)
        lengths.append(len(found.ids))
        sizes.append(found.size)
        counts.append(len(found.spans))
        spans += found.spans
  tokens = np.zeros(0, format.tokenizer.dtype)
  return store_lib.ArrayStore(
    name,
    np.concatenate(parts) if parts else tokens,
    np.array(lengths, np.int64),
    store_lib.sizes_of(sizes),
    store_lib.Scored(np.array(counts), np.array(spans))
    if format.template
    else None,
  )


def _keep(
  store: shards.ShardStore | token_file.TokenFileStore,
  keep: store_lib.Keep | None,
) -> store_lib.TokenStore:
  return store_lib.subset(store, store.names, keep) if keep else store
