import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp import errors
from memcomp.inference import sample

LOGITS = np.array([1.0, 3.0, -2.0, 3.0, 0.5, 2.0, -9.0], np.float32)


def numpy_probabilities(logits, temperature, top_k, top_p):
  """The definition, one token at a time."""
  logits = logits.astype(np.float64) / temperature
  likeliest = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  likeliest = likeliest[: top_k or None]
  p = np.exp(logits[likeliest] - logits.max())
  p /= p.sum()
  kept, mass = [], 0.0
  for i, share in zip(likeliest, p, strict=True):
    if mass >= top_p and top_p < 1:
      break
    kept.append(i)
    mass += share
  result = np.zeros(len(logits))
  result[kept] = np.exp(logits[kept] - logits.max())
  return result / result.sum()


@jax.jit
def draws(logits, seed, temperature, top_k, top_p):
  keys = jax.random.split(jax.random.key(seed), 20_000)
  return jax.vmap(
    lambda key: sample.draw(
      logits, key, temperature=temperature, top_k=top_k, top_p=top_p
    )
  )(keys)


@pytest.mark.parametrize(
  ("temperature", "top_k", "top_p"),
  [
    (1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (2.0, 3, 1.0),
    (1.0, 1, 1.0),
    (1.0, 0, 0.9),
    (1.5, 4, 0.6),  # top_p is of what top_k leaves
    (1.0, 100, 1.0),
    (1.0, 0, 1e-9),
  ],
)
def test_draws_follow_the_definition(temperature, top_k, top_p):
  expected = numpy_probabilities(LOGITS, temperature, top_k, top_p)
  scaled = jnp.array(LOGITS) / temperature
  np.testing.assert_array_equal(sample.keep(scaled, top_k, top_p), expected > 0)
  found = np.asarray(draws(LOGITS, 0, temperature, top_k, top_p))
  shares = np.bincount(found, minlength=7) / len(found)
  # 4 standard deviations of a share of 20,000.
  np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / 141)
  assert np.all(shares[expected == 0] == 0)


def test_random_logits_keep_what_the_definition_keeps():
  rng = np.random.default_rng(3)
  for _ in range(50):
    logits = rng.normal(size=20).astype(np.float32) * 3
    top_k, top_p = int(rng.integers(0, 21)), float(rng.uniform(0.05, 0.95))
    expected = numpy_probabilities(logits, 1.0, top_k, top_p) > 0
    np.testing.assert_array_equal(
      sample.keep(jnp.array(logits), top_k, top_p), expected
    )


def test_temperature_0_takes_the_first_likeliest():
  assert set(np.asarray(draws(LOGITS, 0, 0.0, 0, 1.0))) == {1}


def test_tiny_temperature_is_greedy():
  assert set(np.asarray(draws(LOGITS, 0, 1e-30, 0, 1.0))) == {1, 3}


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("seed", -1),
    ("seed", 2**32),
  ],
)
def test_bad_settings(name, value):
  with pytest.raises(errors.UserError, match=f"{name}={value}: give "):
    sample.Settings(**{name: value})
