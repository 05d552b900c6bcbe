"""Sources, for `test_data_sources` and `test_source_files`."""

import json

from memcomp import config as config_lib
from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.load("bytes")


def open_all(source):
  return sources.open_source(str(source), BYTES)


def texts(store):
  return [
    BYTES.decode(store.read(i, 0, int(n))) for i, n in enumerate(store.lengths)
  ]


def jsonl(*texts_):
  return "".join(json.dumps({"text": t}) + "\n" for t in texts_).encode()


def config(source, **changes):
  return config_lib.DataConfig(source=str(source), **changes)
