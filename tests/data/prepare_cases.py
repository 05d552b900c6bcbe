"""Ways to run prepare, for `test_data_prepare` and `test_prepare_interrupted`."""

import pathlib

from memcomp.data import prepare
from memcomp.data import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.load("bytes")


def run(source, out, **changes):
  settings = {"shard_tokens": 20_000, "workers": 1}
  prepare.prepare(str(source), str(out), **settings | changes)


def contents(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in pathlib.Path(folder).rglob("*")
    if path.is_file() and path.name != "plan.json"
  }
