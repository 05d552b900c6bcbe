"""Which row a document gets, and the order of rows in an epoch."""

import hashlib

import numpy as np


def first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
  """Puts each item into the first bin that has room.

  Args:
    sizes: int `[items]` in [1, capacity].
    capacity: capacity of each bin.

  Returns:
    int64 `[items]`, the bin of each item; bins are numbered as they open.
  """
  items = len(sizes)
  leaves = 1 << max(0, (items - 1).bit_length())
  # Node k holds the largest room of the bins below it. Its children are 2k and
  # 2k+1, so going left first finds the first bin.
  room = [capacity] * (2 * leaves)
  bins = np.empty(items, np.int64)
  for item, size in enumerate(sizes.tolist()):
    node = 1
    while node < leaves:
      node *= 2
      if room[node] < size:
        node += 1
    bins[item] = node - leaves
    room[node] -= size
    while node > 1:
      left = room[node & ~1]
      right = room[node | 1]
      node //= 2
      largest = left if left > right else right
      if room[node] == largest:
        break
      room[node] = largest
  return bins


def permutation(size: int, *key: str | int) -> np.ndarray:
  """Returns a permutation determined by `key`, int64 `[size]`.

  It sorts by a hash, because the numbers of numpy's generators may change
  between versions.
  """
  seed = hashlib.sha256(repr(key).encode()).digest()[:8]
  # splitmix64; the multiplications wrap on purpose.
  x = np.arange(1, size + 1, dtype=np.uint64)
  x = x * np.uint64(0x9E3779B97F4A7C15) + np.frombuffer(seed, "<u8")
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")
