"""Writes the units of `memcomp.data.prepare` on the workers of a Beam runner.

It needs the extra `beam`, in a separate environment (no module of `prepare`
imports JAX). All workers must see the corpus and `out` under the same paths, as
on a network file system. Source: Apache Beam's programming guide.
"""

import argparse
import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence

import apache_beam
from apache_beam.options import pipeline_options

from memcomp import errors
from memcomp.data import chat_template, units
from memcomp.data import progress as progress_lib
from memcomp.data import tokenizer as tokenizer_lib


def check(options: Sequence[str]) -> None:
  """Checks Beam's options and that its runner can be made.

  Args:
    options: see `run`.

  Raises:
    UserError: an option that Beam does not know, a bad value, or no such
      runner. Beam itself drops what it does not know, also misspelled flags of
      prepare.
  """
  # First, because the pipeline would print a page of usage and exit.
  _unknown(options)
  try:
    pipeline = apache_beam.Pipeline(
      options=pipeline_options.PipelineOptions(list(options))
    )
  except (AttributeError, ImportError, TypeError, ValueError) as error:
    said = " ".join(str(error).split()).rstrip(".")
    raise errors.UserError(
      f"--beam: {said}; correct --runner and the other options of Beam"
    ) from error
  shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
  # Again, because the runner was imported and may have options of its own.
  if unknown := _unknown(options):
    raise errors.UserError(
      f"{' '.join(unknown)}: neither prepare nor Beam has this option; correct"
      " it (see --help), or leave it out"
    )


def _unknown(options: Sequence[str]) -> list[str]:
  """Returns the options that Beam does not know.

  Raises:
    UserError: a bad value of one that it knows.
  """
  parsers: list[argparse.ArgumentParser] = []
  beams = pipeline_options.PipelineOptions([])
  beams.get_all_options(add_extra_args_fn=parsers.append)
  (parser,) = parsers
  parser.exit_on_error = False
  try:
    return parser.parse_known_args(list(options))[1]
  except argparse.ArgumentError as error:
    raise errors.UserError(f"--beam: {error}; correct it") from error


def run(
  corpus: units.Corpus,
  todo: Sequence[units.Unit],
  options: Sequence[str],
  progress: progress_lib.PrepareProgress,
) -> Iterator[units.Unit]:
  """Writes units in any order; the result is that of `workers.run`.

  Args:
    corpus: corpus of the units.
    todo: the units.
    options: Beam's command line options, such as "--runner=FlinkRunner", which
      `check` accepts.
    progress: gets all tokens at the end; the runner shows its own progress.

  Yields:
    Each unit, after all are done.

  Raises:
    UserError: bad input, or disk full.
    RuntimeError: the runner failed.
  """
  there = _from_anywhere(corpus)
  pipeline = apache_beam.Pipeline(
    options=pipeline_options.PipelineOptions(list(options))
  )
  _ = (
    pipeline
    | "Units" >> apache_beam.Create(list(todo))
    # Prevents fusion, which would give all work to one worker.
    | "Spread" >> apache_beam.Reshuffle()
    | "Write" >> apache_beam.ParDo(_Write(there))
  )
  try:
    pipeline.run().wait_until_finish()
  except Exception as error:
    # Runners return a worker's error as text, or with extra text.
    kind = type(error)
    said = f"{kind.__module__}.{kind.__qualname__}: {error}"
    cause = re.search(r"memcomp\.errors\.UserError: ([^\n]*)", said)
    if cause is None:
      raise
    message = cause[1].partition(" [while running")[0]
    raise errors.UserError(message) from error
  for unit in todo:
    index = units.read_index(corpus.out, unit)
    progress.add(index["tokens"] if index else 0)
    yield unit


def _from_anywhere(corpus: units.Corpus) -> units.Corpus:
  """Makes paths independent of the working directory."""
  files = tuple(
    dataclasses.replace(file, path=os.path.abspath(file.path))
    for file in corpus.files
  )
  built_in = *tokenizer_lib.WITHOUT_FILE, chat_template.CHATML
  named = {
    name: os.path.abspath(value)
    for name in ("tokenizer", "chat_template")
    if (value := getattr(corpus, name)) not in built_in
    and os.path.exists(value)
  }
  out = os.path.abspath(corpus.out)
  return dataclasses.replace(corpus, files=files, out=out, **named)


class _Write(apache_beam.DoFn):
  """Writes a unit to a temporary folder and moves it, with its index last.

  A runner may try a unit twice at the same time. Each attempt has a separate
  folder, and both move the same files.
  """

  def __init__(self, corpus: units.Corpus):
    self._corpus = corpus

  def setup(self):
    self._tokenizer = tokenizer_lib.load(self._corpus.tokenizer)

  def process(self, unit: units.Unit):
    out = self._corpus.out
    with (
      units.disk_errors(out),
      tempfile.TemporaryDirectory(dir=os.path.join(out, units.UNITS)) as aside,
    ):
      os.mkdir(os.path.join(aside, units.UNITS))
      corpus = dataclasses.replace(self._corpus, out=aside)
      units.write(corpus, unit, self._tokenizer, lambda tokens: None)
      index = units.read_index(aside, unit)
      assert index is not None
      names = [shard["file"] for shard in index["shards"]]
      for name in (*names, *units.index_names(unit)):
        os.replace(os.path.join(aside, name), os.path.join(out, name))
