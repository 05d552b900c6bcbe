"""First fit is first fit, and fast."""

import time

import numpy as np
import pytest

from memcomp.data import order as order_lib


def slow_first_fit(sizes, capacity):
  room, bins = [], []
  for size in sizes:
    found = next((b for b, r in enumerate(room) if r >= size), len(room))
    if found == len(room):
      room.append(capacity)
    room[found] -= size
    bins.append(found)
  return bins


@pytest.mark.parametrize("seed", range(6))
def test_first_fit_is_first_fit(seed):
  sizes = np.random.default_rng(seed).integers(1, 33, 200 + seed)
  assert order_lib.first_fit(sizes, 32).tolist() == slow_first_fit(sizes, 32)
  assert order_lib.first_fit(sizes[:1], 32).tolist() == [0]


def test_first_fit_is_not_quadratic():
  sizes = np.random.default_rng(0).integers(1, 2049, 50_000)
  start = time.perf_counter()
  order_lib.first_fit(sizes, 2048)
  assert time.perf_counter() - start < 5  # 0.1 s; quadratic takes minutes
