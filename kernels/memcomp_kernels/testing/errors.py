"""Relative root-mean-square comparison of pytrees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def relative_rms(actual: jax.Array, expected: jax.Array) -> float:
  """Returns |actual - expected| / |expected|, or |actual| if expected is 0."""
  got, wanted = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  if got.shape != wanted.shape:
    raise AssertionError(f"shapes {got.shape} and {wanted.shape} differ")
  error = np.linalg.norm(got - wanted)
  scale = np.linalg.norm(wanted)
  return float(error / scale if scale > 0 else error)


def assert_close(
  actual: Any, expected: Any, bound: float, what: str = ""
) -> None:
  """Asserts that all leaves agree to `bound`, integers exactly.

  Raises:
    AssertionError: leaves differ; the message names them, and by how much.
  """
  got, tree = jax.tree_util.tree_flatten_with_path(actual)
  want, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
  if tree != expected_tree:
    raise AssertionError(f"{what}: structures {tree} and {expected_tree}")
  wrong = []
  for (path, a), (_, b) in zip(got, want, strict=True):
    name = jax.tree_util.keystr(path)
    if jnp.issubdtype(a.dtype, jnp.floating):
      error = relative_rms(a, b)
      if not error <= bound:  # nan also counts as wrong
        wrong.append(f"{name} {error:.2e}")
    elif not np.array_equal(a, b):
      wrong.append(f"{name} {a} is not {b}")
  if wrong:
    raise AssertionError(f"{what}: over {bound:.0e}: " + ", ".join(wrong))


def assert_no_worse(
  actual: Any, other: Any, truth: Any, floor: float = 1e-6, times: float = 2.0
) -> None:
  """Asserts that each leaf's error is at most `times` that of `other`'s leaf.

  Args:
    actual: result in low precision.
    other: result in low precision to compare with.
    truth: result in a wider precision.
    floor: errors up to this are always accepted.
    times: maximum ratio of the two errors; give a reason for another one.

  Raises:
    AssertionError: leaves err more; the message names them, with both errors.
  """
  wrong = []
  for (path, true), a, b in zip(
    jax.tree_util.tree_leaves_with_path(truth),
    *map(jax.tree.leaves, (actual, other)),
    strict=True,
  ):
    ours, own = relative_rms(a, true), relative_rms(b, true)
    if not ours <= max(times * own, floor):  # nan also counts as worse
      wrong.append(f"{jax.tree_util.keystr(path)} {ours:.2e}, not {own:.2e}")
  if wrong:
    raise AssertionError(f"over {times:g} times the error: " + "; ".join(wrong))


def assert_equal(actual: Any, expected: Any, what: str = "") -> None:
  """Asserts that all leaves are equal to the last bit.

  Raises:
    AssertionError: a leaf differs; the message names the first one.
  """
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(actual),
    jax.tree.leaves(expected),
    strict=True,
  )
  for (path, a), b in pairs:
    if not np.array_equal(np.asarray(a), np.asarray(b)):
      name = jax.tree_util.keystr(path)
      raise AssertionError(f"{what}: {name} differs: {a} is not {b}")


def assert_finite(tree: Any, what: str = "") -> None:
  """Asserts that no leaf holds nan or infinity.

  Raises:
    AssertionError: a leaf is not finite; the message names it.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if not np.all(np.isfinite(np.asarray(leaf))):
      name = jax.tree_util.keystr(path)
      raise AssertionError(f"{what}: {name} is not finite")
