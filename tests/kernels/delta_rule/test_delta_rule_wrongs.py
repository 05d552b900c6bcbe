"""The contract suite bites: mistakes in the delta rule turn it red."""

import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels import contract
from memcomp_kernels.delta_rule import tile
from memcomp_kernels.math import decay, delta
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["delta_rule"]
GATED, PLAIN = (
  subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
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


@pytest.mark.slow
def test_a_memory_before_the_tile_that_does_not_decay(monkeypatch):
  def factors(log_decay):
    right = decay.decay_factors(log_decay)
    return right._replace(from_start=jnp.ones_like(right.from_start))

  replaced(monkeypatch, "decay", decay, decay_factors=factors)
  checks.check_values(PLAIN, 37)  # no decay hides it
  assert_red(GATED)


@pytest.mark.slow
def test_reads_of_errors_as_if_the_memory_were_empty(monkeypatch):
  """U alone in place of U - W S where the tile's own errors are read."""
  right = tile.prepare

  def prepare(inputs, spec, tiling):
    query = contract.read_scale(spec, inputs.query.shape[-1]) * inputs.query
    return right(inputs, spec, tiling)._replace(query=query)

  monkeypatch.setattr(tile, "prepare", prepare)
  assert_red(PLAIN)


def test_a_first_order_series_of_the_inverse(monkeypatch):
  def solve(coupling, target):
    strict = jnp.tril(coupling, -1)
    return target - strict @ target + strict @ (strict @ target)

  replaced(monkeypatch, "delta", delta, solve=solve)
  assert_red(GATED)
