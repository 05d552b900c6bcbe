"""Decay by channel, in blocks, against plain sums over pairs of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.math import channel_decay

TIME, CHANNELS = 8, 3


pytestmark = pytest.mark.usefixtures("float64")


def drawn(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal((1, 2, *shape))


def log_decays(strong):
  decay = -np.exp(drawn(TIME, CHANNELS, seed=1))
  if strong:  # A token that forgets everything, one that forgets one channel.
    decay[:, :, 2] = decay[:, :, 5, 1] = -1e4
  return decay


def pairs(log_decay):
  """exp(G_r - G_i), `[..., r, i, channels]`, by sums of the logs between."""
  shares = np.zeros((1, 2, TIME, TIME, CHANNELS))
  for r in range(TIME):
    for i in range(r + 1):
      between = log_decay[:, :, i + 1 : r + 1].sum(axis=2)
      shares[:, :, r, i] = np.exp(between)
  return shares


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("block", [1, 2, 8])
def test_sums_over_pairs(block, strong):
  log_decay = log_decays(strong)
  shares = pairs(log_decay)
  query, writes = drawn(TIME, CHANNELS, seed=2), drawn(TIME, CHANNELS, seed=3)
  values, matches = drawn(TIME, 5, seed=4), drawn(TIME, TIME, seed=5)

  @jax.jit
  def in_blocks(log_decay):
    factors = channel_decay.channel_decay(log_decay, block)
    dtype = jnp.float64
    return {
      "scores": channel_decay.scores(factors, query, writes, dtype),
      "read": channel_decay.read(factors, query, writes, values, dtype),
      "read_into": channel_decay.read_into(factors, matches, writes, dtype),
      "running_sum": channel_decay.running_sum(factors, writes),
      "to_end": factors.to_end,
      "total": factors.total,
      "from_start": factors.from_start,
    }

  scores = np.einsum("bhrm,bhim,bhrim->bhri", query, writes, shares)
  expected = {
    "scores": scores,
    "read": scores @ values,
    "read_into": np.einsum("bhri,bhim,bhrim->bhrm", matches, writes, shares),
    "running_sum": np.einsum("bhim,bhrim->bhrm", writes, shares),
    "to_end": shares[:, :, -1],
    "total": np.exp(log_decay.sum(axis=2)),
    "from_start": np.exp(np.cumsum(log_decay, axis=2)),
  }
  for name, found in in_blocks(log_decay).items():
    np.testing.assert_allclose(
      found, expected[name], rtol=1e-9, atol=1e-10, err_msg=name
    )


def test_of_sums_is_the_same_from_anywhere():
  log_decay = log_decays(strong=False)
  start = drawn(CHANNELS, seed=6)
  sums = start[:, :, None] + np.cumsum(log_decay, axis=2)
  expected = jax.jit(channel_decay.channel_decay, static_argnums=1)(
    log_decay, 4
  )
  got = jax.jit(channel_decay.of_sums, static_argnums=2)(start, sums, 4)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_gradients_are_finite_where_all_is_forgotten():
  query, writes = drawn(TIME, CHANNELS, seed=2), drawn(TIME, CHANNELS, seed=3)

  def total(log_decay):
    factors = channel_decay.channel_decay(log_decay, 4)
    return jnp.sum(channel_decay.scores(factors, query, writes, jnp.float64))

  gradient = jax.jit(jax.grad(total))(log_decays(strong=True))
  assert np.all(np.isfinite(gradient))
