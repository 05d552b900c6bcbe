"""Decay by channel, in blocks, against plain sums over pairs of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.math import channel_decay

TIME, CHANNELS = 8, 3


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def drawn(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.array(rng.standard_normal((1, 2, *shape)))


def log_decays(strong):
  decay = -jnp.exp(drawn(TIME, CHANNELS, seed=1))
  # A token that forgets everything, one that forgets one channel.
  return (
    decay.at[:, :, 2].set(-1e4).at[:, :, 5, 1].set(-1e4) if strong else decay
  )


def pairs(log_decay):
  """exp(G_r - G_i), `[..., r, i, channels]`, by sums of the logs between."""
  shares = np.zeros((1, 2, TIME, TIME, CHANNELS))
  for r in range(TIME):
    for i in range(r + 1):
      between = log_decay[:, :, i + 1 : r + 1].sum(axis=2)
      shares[:, :, r, i] = np.exp(between)
  return jnp.array(shares)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("block", [1, 2, 8])
def test_sums_over_pairs(block, strong):
  log_decay = log_decays(strong)
  shares = pairs(log_decay)
  factors = channel_decay.channel_decay(log_decay, block)
  query, writes = drawn(TIME, CHANNELS, seed=2), drawn(TIME, CHANNELS, seed=3)
  values, matches = drawn(TIME, 5, seed=4), drawn(TIME, TIME, seed=5)

  def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)

  scores = jnp.einsum("bhrm,bhim,bhrim->bhri", query, writes, shares)
  close(channel_decay.scores(factors, query, writes, jnp.float64), scores)
  close(
    channel_decay.read(factors, query, writes, values, jnp.float64),
    scores @ values,
  )
  close(
    channel_decay.read_into(factors, matches, writes, jnp.float64),
    jnp.einsum("bhri,bhim,bhrim->bhrm", matches, writes, shares),
  )
  close(
    channel_decay.running_sum(factors, writes),
    jnp.einsum("bhim,bhrim->bhrm", writes, shares),
  )
  close(factors.to_end, shares[:, :, -1])
  close(factors.total, jnp.exp(log_decay.sum(axis=2)))
  close(factors.from_start, jnp.exp(jnp.cumsum(log_decay, axis=2)))


def test_of_sums_is_the_same_from_anywhere():
  log_decay = log_decays(strong=False)
  start = drawn(CHANNELS, seed=6)
  sums = start[:, :, None] + jnp.cumsum(log_decay, axis=2)
  expected = channel_decay.channel_decay(log_decay, 4)
  got = channel_decay.of_sums(start, sums, 4)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_gradients_are_finite_where_all_is_forgotten():
  query, writes = drawn(TIME, CHANNELS, seed=2), drawn(TIME, CHANNELS, seed=3)

  def total(log_decay):
    factors = channel_decay.channel_decay(log_decay, 4)
    return jnp.sum(channel_decay.scores(factors, query, writes, jnp.float64))

  assert np.all(np.isfinite(jax.grad(total)(log_decays(strong=True))))
