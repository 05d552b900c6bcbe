r"""Tokenizes text once, into shards that training reads at random.

  memcomp prepare --source='corpus/*.jsonl.zst' --out=shards \
    --tokenizer=tokenizer.json

Then train with `data.source=shards`, and the same `data.format` and
`data.chat_template` if they are of conversations (--format=messages). After an
interruption, the same command resumes. Exit code 2: the input needs a fix; 42:
interrupted.
"""

import argparse
import os
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from memcomp import cli, disk, errors, limits, paths, platforms
from memcomp.data import chat_template as chat_template_lib
from memcomp.data import files as files_lib
from memcomp.data import formats, plan, shards, sources, units
from memcomp.data import progress as progress_lib
from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.data import workers as workers_lib


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  # Print errors below the progress line.
  start = "\n" if sys.stderr and sys.stderr.isatty() else ""
  return cli.guard(
    lambda: _program(argv),
    f"{start}prepare: ",
    interrupted=errors.EXIT_RESUMABLE,
  )


def _program(argv: Sequence[str] | None) -> None:
  flags, more = _flags(argv)
  prepare(
    flags.source,
    flags.out,
    tokenizer=flags.tokenizer,
    format=flags.format,
    chat_template=flags.chat_template,
    shard_tokens=flags.shard_tokens,
    workers=flags.workers,
    verify=flags.verify,
    beam=more if flags.beam else None,
  )


def prepare(
  source: str,
  out: str,
  *,
  tokenizer: str = "bytes",
  format: str = "text",
  chat_template: str = chat_template_lib.CHATML,
  shard_tokens: int = 1 << 25,
  workers: int = 1,
  verify: bool = False,
  beam: Sequence[str] | None = None,
) -> None:
  """Writes the shards of `source`, or those still missing.

  Args:
    source: "stdlib" or comma-separated text files, folders, globs.
    out: folder for the shards; created if missing.
    tokenizer: "bytes" or the path of a tokenizer.json.
    format: "text" or "messages", see `DataConfig.format`.
    chat_template: template of "messages", see `DataConfig.chat_template`.
    shard_tokens: maximum tokens per shard, >= 1.
    workers: number of processes, >= 1; does not change the result.
    verify: whether to compare finished shards with their SHA-256, not only
      their size.
    beam: Apache Beam options, to use its runner instead of `workers`; does not
      change the result.

  Raises:
    UserError: bad input or settings; `out` has other contents; disk full.
  """
  if not out:
    raise errors.UserError("--out is empty; name a folder for the shards")
  paths.check_local("out", out)
  limits.check("--shard_tokens", shard_tokens, 1, 2**40)
  limits.check("--workers", workers)
  beam_lib = None
  if beam is not None:
    beam_lib = _beam()
    beam_lib.check(beam)
  loaded = tokenizer_lib.load(tokenizer)
  if loaded.name == tokenizer_lib.NONE:
    raise errors.UserError(
      "--tokenizer=none: its ids stand for no text; give bytes, or a"
      " tokenizer.json"
    )
  of = formats.load(format, chat_template, loaded)
  files = tuple(_find(source))
  of.check(files)
  corpus = units.Corpus(
    files=files,
    out=out,
    tokenizer=tokenizer,
    shard_tokens=shard_tokens,
    record_tokens=min(units.RECORD_TOKENS, shard_tokens),
    format=format,
    chat_template=chat_template,
  )
  # One unit makes about one shard: English text has some 4 bytes per token.
  bytes_per_token = 1 if loaded.vocab_size <= 256 else 4
  work = units.cut(files, shard_tokens * bytes_per_token)
  with disk.clear_errors(f"--out: cannot write to {out}"):
    os.makedirs(os.path.join(out, units.UNITS), exist_ok=True)
  busy = f"--out: {out} is being written"
  with disk.locked(pathlib.Path(out, plan.LOCK), busy):
    with units.disk_errors(out):
      plan.claim(corpus, of)
    todo = [unit for unit in work if not _is_done(corpus, unit, verify)]
    progress = progress_lib.PrepareProgress(corpus, work, todo)
    if beam_lib is None:
      done = workers_lib.run(corpus, todo, loaded, workers, progress)
    else:
      done = beam_lib.run(corpus, todo, beam, progress)
    for unit in done:
      progress.finished(unit)
    with units.disk_errors(out):
      tokens = _finish(corpus, work, of)
    progress.close(f"{tokens:,} tokens in {out}")


def _beam() -> types.ModuleType:
  try:
    from memcomp.data import beam
  except ImportError as error:
    raise errors.UserError(
      "--beam needs Apache Beam: pip install 'memcomp[beam]', in an environment"
      " of its own"
    ) from error
  return beam


def _flags(
  argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[str]]:
  """Returns the flags, and with --beam also Beam's options."""
  parser = argparse.ArgumentParser(
    prog="memcomp prepare",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add(
    "--source",
    required=True,
    help="comma-separated text files, folders or globs (.txt .md .py .jsonl "
    'with a field "text"; also .gz .zst), or stdlib. A file other than .jsonl '
    "is one document and is held in memory",
  )
  add(
    "--out",
    type=paths.expand,
    required=True,
    help="folder for the shards, created if missing",
  )
  add(
    "--tokenizer",
    type=paths.expand,
    default="bytes",
    help="bytes, or the path of a tokenizer.json (default: bytes)",
  )
  add(
    "--format",
    choices=formats.FORMATS,
    default="text",
    help='messages: .jsonl with a field "messages", whose answers alone are'
    " trained on (default: text)",
  )
  add(
    "--chat_template",
    type=paths.expand,
    default=chat_template_lib.CHATML,
    help="chat template for --format=messages: chatml, or the path of a "
    "tokenizer_config.json (default: chatml)",
  )
  add(
    "--shard_tokens",
    type=int,
    default=1 << 25,
    help="maximum tokens per shard (default: %(default)s)",
  )
  add(
    "--workers",
    type=int,
    default=platforms.cores(),
    help="processes; does not change the result (default: one per core, "
    "%(default)s)",
  )
  add(
    "--verify",
    action="store_true",
    help="also read finished shards, and rewrite those with a wrong SHA-256",
  )
  add(
    "--beam",
    action="store_true",
    help="use a runner of Apache Beam (extra beam), which gets all flags "
    "that are not listed here, such as --runner; its workers must see "
    "--source and --out under the same paths",
  )
  flags, more = parser.parse_known_args(argv)
  if more and not flags.beam:
    parser.error(f"unrecognized arguments: {' '.join(more)}")
  return flags, more


def _find(source: str) -> list[files_lib.TextFile]:
  listed = sources.split_list(source, "--source")
  for path in listed:
    if paths.is_remote(path):
      raise errors.UserError(
        f"--source: {path!r} is in a bucket; copy it to a disk, where text is"
        " read"
      )
    if ";" in path or path.endswith(".bin"):
      raise errors.UserError(
        f"--source: {path!r} is no text; mixtures and token files go straight "
        "into data.source"
      )
  return files_lib.find_all(listed, field="--source")


def _is_done(corpus: units.Corpus, unit: units.Unit, verify: bool) -> bool:
  out = corpus.out
  index = units.read_index(out, unit)
  if index is None:
    return False
  # JSON has no checksum, so its counts have to agree with the arrays.
  tokens = _tokens(units.index_path(out, unit, ".npz"))
  records = sum(entry["records"] for entry in index["shards"])
  due = -(-index["tokens"] // corpus.record_tokens)
  if (index["tokens"], records) != (tokens, due):
    return False
  try:
    for entry in index["shards"]:
      shards.check_file(out, entry, content=verify)
  except errors.UserError:
    return False
  return True


def _tokens(path: str) -> int | None:
  """Returns the tokens of a unit by its .npz; None if an array is damaged.

  Reading compares the checksum of each array.
  """
  try:
    with open(path, "rb") as stream, np.load(stream) as archive:
      arrays = dict(archive)
    return int(arrays["lengths"].sum())
  except MemoryError:
    raise
  except Exception:  # zipfile and zlib raise many kinds
    return None


def _finish(
  corpus: units.Corpus,
  work: list[units.Unit],
  format: formats.Format,
) -> int:
  """Writes the manifest from the units' indices; returns the token count."""
  tokenizer = format.tokenizer
  indices = [_index(corpus.out, unit) for unit in work]
  keys = ["lengths", "file_number", "line", "sizes"]
  if format.template:
    keys += ["counts", "spans"]
  documents: dict[str, list[np.ndarray]] = {key: [] for key in keys}
  for unit in work:
    with np.load(units.index_path(corpus.out, unit, ".npz")) as archive:
      for key in keys:
        if key in archive:  # units of older versions lack sizes
          documents[key].append(archive[key])
  total = sum(index["tokens"] for index in indices)
  if not total:
    raise errors.UserError("--source: no text in it; give files with text")
  path = os.path.join(corpus.out, shards.DOCUMENTS)
  if len(documents["sizes"]) < len(work):
    del documents["sizes"]
  merged = {key: np.concatenate(arrays) for key, arrays in documents.items()}
  if store_lib.sizes_of(merged.get("sizes", [])) is None:
    merged.pop("sizes", None)  # the tokens spell the text
  units.save_arrays(path, **merged)
  manifest = {
    **plan.entries(format),
    "tokenizer": {
      # Not its path, so that the same corpus gives the same manifest anywhere.
      "name": os.path.basename(tokenizer.name),
      "fingerprint": tokenizer.fingerprint,
      "vocab_size": tokenizer.vocab_size,
    },
    "dtype": tokenizer.dtype.newbyteorder("<").str,
    "record_tokens": corpus.record_tokens,
    "num_tokens": total,
    "num_documents": len(merged["lengths"]),
    "unit_tokens": [index["tokens"] for index in indices],
    "files": [file.name for file in corpus.files],
    "documents": units.entry(path),
    "shards": [shard for index in indices for shard in index["shards"]],
  }
  units.save_json(os.path.join(corpus.out, shards.MANIFEST), manifest)
  return total


def _index(out: str, unit: units.Unit) -> dict[str, Any]:
  index = units.read_index(out, unit)
  if index is None:
    raise errors.UserError(
      f"{units.index_path(out, unit, '.json')}: vanished while prepare ran; "
      "run the same command again"
    )
  return index


if __name__ == "__main__":
  sys.exit(main())
