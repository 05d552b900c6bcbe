"""Writes the units of `memcomp.data.prepare` on the workers of a Beam runner.

It needs the extra `beam`, in a separate environment (no module of `prepare`
imports JAX). All workers must see the corpus and `out` under the same paths, as
on a network file system. Source: Apache Beam's programming guide.
"""

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Sequence

import apache_beam
from apache_beam.options import pipeline_options

from memcomp import errors
from memcomp.data import chat_template, units
from memcomp.data import progress as progress_lib
from memcomp.data import tokenizer as tokenizer_lib


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
    options: Beam's command line options, such as "--runner=FlinkRunner".
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
