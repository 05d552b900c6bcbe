import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp import errors
from memcomp.inference import sample

LOGITS = np.array([1.0, 3.0, -2.0, 3.0, 0.5, 2.0, -9.0], np.float32)
USED = np.array([0, 1, 1, 0, 0, 1, 0], bool)
COUNT = 20_000


def numpy_probabilities(logits, temperature, top_k, top_p, min_p, penalty):
  """The definition, one token at a time."""
  logits = logits.astype(np.float64)
  for i in np.flatnonzero(USED):
    logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
  logits = logits / temperature
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
  result /= result.sum()
  result[result < min_p * result.max()] = 0
  return result / result.sum()


def settings(
  temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalty=1.0, **more
):
  return sample.Settings(
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    repetition_penalty=penalty,
    **more,
  )


@jax.jit
def drawn(logits, knobs):
  rows = jnp.broadcast_to(logits, (COUNT, len(LOGITS)))
  used = jnp.broadcast_to(USED, rows.shape)
  return sample.draw(rows, jnp.arange(COUNT), used, knobs)


def draws(logits, *arguments, **more):
  knobs = sample.knobs(settings(*arguments, **more), COUNT)
  return np.asarray(drawn(logits, knobs))


@pytest.mark.parametrize(
  "arguments",
  [
    (1.0,),
    (0.5,),
    (2.0, 3),
    (1.0, 1),
    (1.0, 0, 0.9),
    (1.5, 4, 0.6),  # top_p is of what top_k leaves
    (1.0, 100),
    (1.0, 0, 1e-9),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),  # both of the likeliest
    (2.0, 5, 0.95, 0.3),
    (1.0, 0, 1.0, 0.0, 1.5),
    (0.7, 3, 0.9, 0.05, 3.0),  # the penalty comes first
    (1.0, 0, 1.0, 0.0, 0.5),
  ],
  ids=str,
)
def test_draws_follow_the_definition(arguments):
  full = arguments + (1.0, 0, 1.0, 0.0, 1.0)[len(arguments) :]
  expected = numpy_probabilities(LOGITS, *full)
  found = draws(LOGITS, *arguments)
  shares = np.bincount(found, minlength=7) / COUNT
  # 4 standard deviations of a share of 20,000.
  np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / 141)
  assert np.all(shares[expected == 0] == 0)


def test_random_logits_keep_what_the_definition_keeps(monkeypatch):
  rng = np.random.default_rng(3)
  monkeypatch.setattr(f"{__name__}.USED", np.zeros(20, bool))
  logits = rng.normal(size=(50, 20)).astype(np.float32) * 3
  each = [
    settings(
      top_k=int(rng.integers(0, 21)),
      top_p=float(rng.uniform(0.05, 0.95)),
      min_p=float(rng.uniform(0, 0.2)),
    )
    for _ in logits
  ]
  shifted = logits - logits.max(axis=1, keepdims=True)
  kept = jax.jit(sample.keep)(shifted, sample.knobs(each, 50))
  for row, one, found in zip(logits, each, kept, strict=True):
    expected = numpy_probabilities(
      row, 1.0, one.top_k, one.top_p, one.min_p, 1.0
    )
    np.testing.assert_array_equal(found, expected > 0)


def test_temperature_0_takes_the_first_likeliest():
  assert set(draws(LOGITS, 0.0)) == {1}


def test_a_penalty_counts_for_the_likeliest_too():
  assert set(draws(LOGITS, 0.0, penalty=1.1)) == {3}


def test_tiny_temperature_is_greedy():
  assert set(draws(LOGITS, 1e-30)) == {1, 3}


def test_rows_have_settings_of_their_own():
  each = [
    settings(0.0),
    settings(1.0, 1, seed=3),
    settings(5.0, seed=1),
    settings(5.0, seed=1),
    settings(5.0, seed=2),
  ]
  run = jax.jit(sample.draw)
  made = []
  for place in range(40):
    rows = np.tile(LOGITS, (5, 1))
    position = np.full(5, place, np.int32)
    made.append(
      run(rows, position, np.zeros(rows.shape, bool), sample.knobs(each, 5))
    )
  greedy, one, first, same, other = np.stack(made, 1).tolist()
  assert set(greedy) == {1}
  assert set(one) == {1}
  assert first == same != other
  with pytest.raises(errors.UserError, match="4 settings for 5 texts"):
    sample.knobs(each[:4], 5)


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
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("inf")),
    # Float32, in which the device computes, has no such numbers.
    ("repetition_penalty", 1e39),
    ("repetition_penalty", 1e-50),
    ("temperature", 1e39),
    ("top_p", 1e-50),
    # Nor do devices compute with the smallest: they take them for 0.
    ("temperature", 1e-40),
    ("top_p", 1e-38),
    ("min_p", 1e-45),
    ("repetition_penalty", 1e-38),
    ("top_k", True),
    ("seed", True),
    ("seed", -1),
    ("seed", 2**32),
  ],
)
def test_bad_settings(name, value):
  message = re.escape(f"{name}={value}: give ")
  with pytest.raises(errors.UserError, match=message):
    sample.Settings(**{name: value})


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_rows_draw_as_alone_whatever_the_default_generator(generator):
  logits = np.random.default_rng(0).normal(size=50).astype(np.float32)

  @jax.jit
  def run(knobs):
    rows = jnp.broadcast_to(logits, (len(knobs.seed), 50))
    position = jnp.full(len(rows), 7)
    return sample.draw(rows, position, jnp.zeros(rows.shape, bool), knobs)

  def draw(*seeds):
    each = [sample.Settings(seed=seed) for seed in seeds]
    return np.asarray(run(sample.knobs(each, len(seeds)))).tolist()

  expected = draw(*range(8))
  with jax.default_prng_impl(generator):
    assert draw(*range(8)) == expected
    assert [draw(seed)[0] for seed in range(8)] == expected
