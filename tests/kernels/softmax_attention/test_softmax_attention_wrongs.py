"""The contract suite bites on the well-known mistakes of windows."""

import dataclasses
import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels import window
from memcomp_kernels.softmax_attention import tile
from memcomp_kernels.testing import checks, memories, packed_checks, subjects

MEMORY = memories.MEMORIES["softmax_attention"]
WINDOW = subjects.Subject(MEMORY, MEMORY.specs["window"], "xla_chunked")
SINKS = subjects.Subject(MEMORY, MEMORY.specs["window-sinks"], "xla_chunked")
FULL = subjects.Subject(MEMORY, MEMORY.specs["full"], "xla_chunked")


def with_placement(monkeypatch, wrong):
  right = window.placement
  monkeypatch.setattr(
    window,
    "placement",
    lambda *args, **keywords: wrong(right(*args, **keywords)),
  )


def test_a_window_of_one_more_token(monkeypatch):
  right = tile.sees

  def wrong(*args, ring, **keywords):
    return right(*args, ring=ring + 1, **keywords)

  monkeypatch.setattr(tile, "sees", wrong)
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(WINDOW, 37)


def test_a_token_that_sees_the_next(monkeypatch):
  right = tile.sees

  def wrong(position, other, **keywords):
    return right(position + 1, other, **keywords)

  monkeypatch.setattr(tile, "sees", wrong)
  with pytest.raises(AssertionError, match="causality"):
    checks.check_causal(FULL, 37)


@pytest.mark.slow
def test_segments_that_leak(monkeypatch):
  def wrong(plan):
    return dataclasses.replace(plan, run=jnp.minimum(plan.run, 0))

  with_placement(monkeypatch, wrong)
  with pytest.raises(AssertionError, match="packed"):
    packed_checks.check_packing(FULL, [5, 9], 1)


@pytest.mark.slow
def test_a_prefix_that_is_lost(monkeypatch):
  def wrong(plan):
    return dataclasses.replace(plan, inherits=jnp.zeros((), bool))

  with_placement(monkeypatch, wrong)
  with pytest.raises(AssertionError, match="packed"):
    packed_checks.check_packing(SINKS, [5, 9], 1)


def test_sinks_that_are_forgotten(monkeypatch):
  right = window.sinks

  def wrong(*args):
    found, exists, run = right(*args)
    return found, exists & False, run

  monkeypatch.setattr(window, "sinks", wrong)
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(SINKS, 100)


@pytest.mark.slow
def test_a_softmax_without_its_maximum(monkeypatch):
  wrong = vars(jnp) | {"max": lambda x, **keywords: jnp.zeros_like(x[..., :1])}
  monkeypatch.setattr(tile, "jnp", python_types.SimpleNamespace(**wrong))
  checks.check_values(FULL, 37)  # ordinary values hide it
  with pytest.raises(AssertionError, match="huge scores"):
    checks.check_edges(FULL, 29)
