"""The contract suite bites: mistakes in slot attention turn it red."""

import types as python_types

import jax.numpy as jnp
import pytest
import rotation

from memcomp_kernels.math import channel_decay
from memcomp_kernels.slot_attention import tile
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["slot_attention"]
GATED, SOFTMAX = (
  subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
  for name in ("gated", "softmax")
)


def in_tile(monkeypatch, **functions):
  """Replaces functions of the decay in the chunk form only."""
  wrong = python_types.SimpleNamespace(**vars(channel_decay) | functions)
  monkeypatch.setattr(tile, "channel_decay", wrong)


def assert_red(subject):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, 37)


def of_shares(change):
  def changed(*arguments):
    return change(channel_decay.of_sums(*arguments))

  def channel(log_decay, block):
    return change(channel_decay.channel_decay(log_decay, block))

  return {"of_sums": changed, "channel_decay": channel}


@pytest.mark.slow
@pytest.mark.parametrize("subject", [GATED, SOFTMAX], ids=["gated", "softmax"])
def test_what_is_patched_is_right(monkeypatch, subject):
  in_tile(monkeypatch, **of_shares(lambda shares: shares))
  checks.check_values(subject, 37)


@pytest.mark.parametrize(
  "subject", rotation.cases([GATED, SOFTMAX], [GATED]), ids=["gated", "softmax"]
)
def test_a_token_that_does_not_see_itself(monkeypatch, subject):
  def strict(shares):
    size = shares.within.shape[-2]
    below = jnp.tril(jnp.ones((size, size)), -1)[..., None]
    return shares._replace(within=below * shares.within)

  in_tile(monkeypatch, **of_shares(strict))
  assert_red(subject)


def test_one_decay_for_all_slots(monkeypatch):
  def mean(log_decay, block):
    shared = jnp.mean(log_decay, axis=-1, keepdims=True)
    log_decay = jnp.broadcast_to(shared, log_decay.shape)
    return channel_decay.channel_decay(log_decay, block)

  in_tile(monkeypatch, channel_decay=mean)
  assert_red(GATED)


def test_blocks_that_do_not_see_each_other(monkeypatch):
  in_tile(monkeypatch, **of_shares(lambda x: x._replace(to_block=None)))
  assert_red(GATED)


@pytest.mark.slow
def test_exp_of_positive_sums(monkeypatch):
  """exp(G_r) exp(-G_i), the usual split of a share."""

  def split(shares):
    size = shares.within.shape[-2]
    from_start = channel_decay.into_blocks(shares.from_start, size)
    ratio = from_start[..., :, None, :] / from_start[..., None, :, :]
    causal = jnp.tril(jnp.ones((size, size), bool))[..., None]
    return shares._replace(within=jnp.where(causal, ratio, 0))

  in_tile(monkeypatch, **of_shares(split))
  with pytest.raises(AssertionError, match="forgets all"):
    checks.check_edges(GATED, 29)


@pytest.mark.slow
def test_empty_places_that_are_written(monkeypatch):
  """A write logit of zero is a write."""

  def wrong(call):
    return right(call._replace(valid=jnp.ones_like(call.valid)))

  right = tile.run
  monkeypatch.setattr(tile, "run", wrong)
  checks.check_values(SOFTMAX, 64)  # whole tiles have no empty places
  assert_red(SOFTMAX)
