"""Results as text for the terminal and as JSON files."""

import errno
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from memcomp import config as config_lib
from memcomp import disk, errors, integrity, platforms
from memcomp.data import store as store_lib
from memcomp.evaluation import load
from memcomp.models import overview


def describe(checkpoint: load.Checkpoint) -> dict[str, Any]:
  """Returns the description of a model that every result includes."""
  config = checkpoint.config
  return {
    "name": config.name,
    "step": checkpoint.step,
    "seed": config.seed,
    "parameters": checkpoint.meta["param_count"],
    "state_bytes": overview.state_bytes(
      config.model, config.data.sequence_length
    ),
    "tokenizer": {
      "name": config.data.tokenizer,
      "fingerprint": checkpoint.tokenizer.fingerprint,
    },
    "versions": platforms.versions(),
    "config": config_lib.to_dict(config),
  }


def describe_text(
  store: store_lib.TokenStore, num_bytes: int
) -> dict[str, Any]:
  """Returns the description of a text that every result includes."""
  return {
    "name": store.name,
    "fingerprint": store.fingerprint,
    "documents": len(store.lengths),
    "tokens": store.num_tokens,
    "bytes": num_bytes,
  }


def task_hash(**task: Any) -> str:
  """Returns 16 hex digits; equal for equal tasks on equal text."""
  return store_lib.digest(json.dumps(task, sort_keys=True))


def model_label(checkpoint: load.Checkpoint, *, step: bool = False) -> str:
  """Returns the name of a model for tables."""
  config = checkpoint.config
  label = (
    f"{overview.mixer_names(config.model)}, "
    f"{checkpoint.meta['param_count']:,} parameters, seed {config.seed}"
  )
  return f"{config.name}: {label}, step {checkpoint.step}" if step else label


def whole_text(found: dict[str, Any]) -> str:
  """Returns the figures of the whole text in one line."""
  whole, text = found["trained_length"], found["text"]
  if whole["bits_per_byte"] is None and not whole["bytes"]:
    return f"nothing was scored of {text['name']}: its tokens have no bytes"
  perplexity = whole["perplexity"]
  scored = f"all {text['bytes']:,} bytes"
  if "streamed" not in found:
    count = text["documents"]
    scored = (
      f"the {whole['bytes']:,} bytes of the answers in"
      f" {counted(count, 'conversation')}"
    )
  return (
    f"{number(whole['bits_per_byte'])} bits per byte, perplexity "
    f"{'not finite' if perplexity is None else f'{perplexity:,.3f}'} a token: "
    f"{scored} in windows of {counted(whole['window'], 'token')}, "
    "each with a fresh state"
  )


def comparison(rows: list[dict[str, Any]], num_bytes: int) -> str:
  """Returns a table of bits per byte."""
  lines = [f"bits per byte on the same {num_bytes:,} validation bytes"]
  cells = [(row["name"], number(row["bits_per_byte"])) for row in rows]
  return "\n".join(lines + _aligned(cells))


def sampling(settings: config_lib.EvaluationConfig, seed: int) -> str:
  """Returns the line above a sample."""
  top_k = f", top_k {settings.top_k}" if settings.top_k else ""
  return (
    f"sample (temperature {settings.temperature}{top_k}, top_p "
    f"{settings.top_p}, seed {seed}) after {settings.prompt!r}:"
  )


def positions(streamed: dict[str, Any]) -> str:
  """Returns the table of bits per byte by position."""
  window, spans = streamed["window"], streamed["rows"]
  lines = [
    f"bits per byte by position: {counted(spans, 'span')} of "
    f"{counted(streamed['positions'], 'token')}; trained at {window:,}"
  ]
  rows = [("position", "state carried", f"fresh every {window:,}", "gain")]
  for bucket in streamed["buckets"]:
    if bucket["bits_per_byte"] is None and not bucket["bytes"]:
      continue
    carried, fresh = bucket["bits_per_byte"], bucket["fresh_bits_per_byte"]
    if None in (carried, fresh):
      gain = "not finite"
    else:
      gain = f"{fresh - carried:+.3f}"
      if bucket["gain_error"] is not None:
        gain += f" +- {bucket['gain_error']:.3f}"
    place = f"{bucket['first']:,}-{bucket['last']:,}"
    rows.append((place, number(carried), number(fresh), gain))
  lines += _aligned(rows)
  if spans > 1:
    lines.append("  (+- is the standard error over the spans)")
  return "\n".join(lines)


def throughput(rows: list[dict[str, Any]]) -> str:
  """Returns the table of `throughput.measure`."""
  cells = [
    ("context", "tokens/s read", "ms a token", "KiB of state", "MiB peak")
  ]
  for row in rows:
    cells.append(
      (
        f"{row['context']:,}",
        f"{row['read_tokens_per_second']:,.0f}",
        f"{1e3 * row['seconds_per_token']:.3f}",
        f"{row['state_bytes'] / 2**10:,.0f}",
        f"{row['peak_bytes'] / 2**20:,.0f}",
      )
    )
  return "\n".join(_aligned(cells))


def counted(count: int, noun: str) -> str:
  """Returns "1 row" or "1,000 rows"."""
  return f"{count:,} {noun}{'s' * (count != 1)}"


def deviation(values: np.ndarray) -> float | None:
  """Returns the standard deviation of a sample; None for a single value."""
  return float(values.std(ddof=1)) if values.size > 1 else None


def number(bits: float | None) -> str:
  """Formats bits per byte for a table."""
  return "not finite" if bits is None else f"{bits:.3f}"


def make_folder(path: pathlib.Path) -> pathlib.Path:
  """Creates a folder for results, before measuring for minutes.

  Raises:
    UserError: it cannot be created or written.
  """
  with disk.clear_errors(f"cannot write {path}"):
    try:
      path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
      raise errors.UserError(
        f"cannot write {path}: {error.filename} is not a folder; choose "
        "another --out"
      ) from error
    if not os.access(path, os.W_OK | os.X_OK):
      raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
  return path


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  """Writes a result atomically.

  Raises:
    UserError: no space or no permission.
  """
  write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file atomically.

  Raises:
    UserError: no space or no permission.
  """
  with disk.clear_errors(f"cannot write {path}"):
    integrity.replace_text(path, text)


def announce(written: Sequence[pathlib.Path | str]) -> None:
  """Prints the written files, or lines about them."""
  print("\nwritten:")
  for path in written:
    line = path if isinstance(path, str) else shown(path)
    print(f"  {line}", flush=True)


def shown(path: pathlib.Path) -> str:
  """Returns the shortest form of a path that can be typed here."""
  relative = os.path.relpath(path)
  return str(path) if relative.startswith("..") else relative


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for name, *cells in rows:
    padded = [c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)]
    lines.append("  ".join(["", name.ljust(widths[0]), *padded]))
  return lines
