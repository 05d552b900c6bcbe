"""Loaders of small stores, for `test_data_loader` and `test_loader_place`."""

import numpy as np
import pytest

from memcomp import config as config_lib
from memcomp.data import loader as loader_lib
from memcomp.data import packing
from memcomp.data import store as store_lib

LENGTH = 8


def make_store(num_documents=200, *, seed=0, first=0, name="made"):
  lengths = np.random.default_rng(seed).integers(1, 25, num_documents)
  tokens = np.arange(first, first + lengths.sum(), dtype=np.uint32)
  return store_lib.ArrayStore(name, tokens, lengths)


def make_mixture():
  parts = [make_store(200), make_store(100, seed=1, first=10_000)]
  return store_lib.Mixture(parts, [0.75, 0.25])


def make(store=None, *, batch_size=8, shuffle=True, local_rows=None, **changes):
  settings = {"sequence_length": LENGTH, "packing": "concat", "prefetch": 0}
  return loader_lib.make_loader(
    config_lib.DataConfig(**settings | changes),
    store or make_store(),
    batch_size=batch_size,
    shuffle=shuffle,
    local_rows=local_rows,
  )


def take(loader, count):
  return [next(loader) for _ in range(count)]


def assert_equal(ours, theirs):
  assert len(ours) == len(theirs)
  for mine, other in zip(ours, theirs, strict=True):
    for a, b in zip(mine, other, strict=True):
      np.testing.assert_array_equal(a, b)


STORES = {"one": make_store, "mixture": make_mixture}
EVERY = pytest.mark.parametrize("pack", packing.PACKINGS)
