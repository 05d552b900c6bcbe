"""The contract suite bites: mistakes in the delta rule turn it red."""

import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels.delta_rule import tile
from memcomp_kernels.primitives import decay, delta, outer
from memcomp_kernels.testing import checks, memories

MEMORY = memories.MEMORIES["delta_rule"]
GATED, PLAIN = (
  checks.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
  for name in ("gated", "not-gated")
)


def replaced(monkeypatch, name, module, **functions):
  """Replaces functions of a module that the tile uses."""
  wrong = python_types.SimpleNamespace(**vars(module) | functions)
  monkeypatch.setattr(tile, name, wrong)


def assert_red(subject):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, 37)


def test_errors_of_the_tiles_start(monkeypatch):
  """The popular shortcut: writes of a tile that do not see each other."""
  replaced(monkeypatch, "delta", delta, solve=lambda coupling, target: target)
  assert_red(PLAIN)


def test_the_coupling_transposed(monkeypatch):
  def solve(coupling, target):
    return delta.solve(jnp.swapaxes(coupling, -1, -2), target)

  replaced(monkeypatch, "delta", delta, solve=solve)
  assert_red(GATED)


def test_errors_before_the_decay(monkeypatch):
  """Tensor Cache's order: the error is that of the memory not yet decayed."""

  def factors(log_decay):
    right, before = (
      decay.decay_factors(log_decay),
      decay.decay_before(log_decay),
    )
    return Shifted(right, before)

  class Shifted:
    """Shares before a token's own step for errors, after it for reads."""

    def __init__(self, right, before):
      self.after, self.from_start = right, before.from_start
      self.between = before.between

  def read(memory, query, key, written, factors):
    return outer.read(memory, query, key, written, factors.after)

  def write(memory, key, written, factors, dtype):
    return outer.write(memory, key, written, factors.after, dtype)

  replaced(monkeypatch, "decay", decay, decay_factors=factors)
  replaced(monkeypatch, "outer", outer, read=read, write=write)
  checks.check_values(PLAIN, 37)  # no decay hides it
  assert_red(GATED)


def test_a_first_order_series_of_the_inverse(monkeypatch):
  def solve(coupling, target):
    strict = jnp.tril(coupling, -1)
    return target - strict @ target + strict @ (strict @ target)

  replaced(monkeypatch, "delta", delta, solve=solve)
  assert_red(GATED)
