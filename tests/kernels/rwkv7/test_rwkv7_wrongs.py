"""The contract suite bites: mistakes in RWKV-7 turn it red."""

import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels.math import channel_decay, delta
from memcomp_kernels.rwkv7 import tile
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["rwkv7"]
SUBJECT = subjects.Subject(MEMORY, MEMORY.specs["released"], "xla_chunked")


def patched(monkeypatch, module, **functions):
  """Replaces functions of a module in the chunk form only."""
  name = module.__name__.rpartition(".")[2]
  wrong = python_types.SimpleNamespace(**vars(module) | functions)
  monkeypatch.setattr(tile, name, wrong)


def assert_red():
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(SUBJECT, 37)


@pytest.mark.slow
def test_what_is_patched_is_right(monkeypatch):
  patched(monkeypatch, channel_decay)
  patched(monkeypatch, delta)
  checks.check_values(SUBJECT, 37)


def test_removal_after_the_decay(monkeypatch):
  """Exponents G_t - G_i, as in the gated delta rule."""
  right = channel_decay.scores

  def scores(factors, query, writes, dtype):
    found = right(factors, jnp.roll(query, 1, axis=-2), writes, dtype)
    return jnp.roll(found, -1, axis=-2)

  patched(monkeypatch, channel_decay, scores=scores)
  assert_red()


def test_one_decay_for_all_channels(monkeypatch):
  def mean(log_decay, block):
    shared = jnp.mean(log_decay, axis=-1, keepdims=True)
    log_decay = jnp.broadcast_to(shared, log_decay.shape)
    return channel_decay.channel_decay(log_decay, block)

  patched(monkeypatch, channel_decay, channel_decay=mean)
  assert_red()


def test_transposed_couplings(monkeypatch):
  def solve(coupling, target):
    return delta.solve(jnp.swapaxes(coupling, -1, -2), target)

  patched(monkeypatch, delta, solve=solve)
  assert_red()


@pytest.mark.slow
def test_removals_that_do_not_see_each_other(monkeypatch):
  patched(monkeypatch, delta, solve=lambda coupling, target: target)
  assert_red()


@pytest.mark.slow
def test_a_token_that_does_not_see_itself(monkeypatch):
  def strict(log_decay, block):
    shares = channel_decay.channel_decay(log_decay, block)
    below = jnp.tril(jnp.ones((block, block)), -1)[..., None]
    return shares._replace(within=below * shares.within)

  patched(monkeypatch, channel_decay, channel_decay=strict)
  assert_red()
