"""Rotary positions: by hand, relative, packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp.layers import rotary
from memcomp_kernels import contract


def test_by_hand():
  x = jnp.array([[[[1.0, 0.0, 0.0, 2.0, 5.0]]]])
  y = rotary.Rotary(dim=4, base=100.0)(x, jnp.array([[3]]))
  # Pairs (0, 1) and (2, 3) turn by 3 and 3 / 10; channel 4 stays.
  expected = [
    np.cos(3),
    np.sin(3),
    -2 * np.sin(0.3),
    2 * np.cos(0.3),
    5.0,
  ]
  np.testing.assert_allclose(y[0, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("frequencies", rotary.FREQUENCIES)
def test_scores_depend_on_the_distance_alone(frequencies):
  turn = rotary.Rotary(dim=8, frequencies=frequencies)
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

  def score(at, distance):
    one, two = jnp.array([[at]]), jnp.array([[at - distance]])
    return float(jnp.sum(turn(q, one) * turn(k, two)))

  assert score(40, 7) == pytest.approx(score(7, 7), rel=1e-4)
  assert score(40, 7) != pytest.approx(score(40, 6), rel=1e-2)


def test_reversed_is_the_rotation_back():
  x = jax.random.normal(jax.random.key(0), (1, 3, 2, 6))
  positions = jnp.array([[1, 5, 7]])
  there = rotary.Rotary(dim=4)(x, positions)
  back = rotary.Rotary(dim=4, reversed=True)(there, positions)
  np.testing.assert_allclose(back, x, atol=1e-5)
  assert np.abs(there - x).max() > 0.1


def test_slowest_frequencies():
  def slowest(**fields):
    return rotary.Rotary(dim=16, **fields)._frequencies()[-1]

  assert slowest(frequencies="inclusive") == pytest.approx(1e-4)
  assert slowest() == pytest.approx(1e4 ** (-14 / 16))


@pytest.mark.parametrize("frequencies", ["standard", "inclusive"])
@pytest.mark.parametrize("dim", [4, 8, 32])
def test_the_slowest_frequency_is_stretched_exactly(frequencies, dim):
  def found(scale):
    turned = rotary.Rotary(dim=dim, frequencies=frequencies, scale=scale)
    return turned._frequencies()

  np.testing.assert_allclose(found(4.0)[-1], found(1.0)[-1] / 4)
  assert found(4.0)[0] == 1


def test_positions_are_those_of_the_segment():
  ids = jnp.array([[3, 3, 0, 3, 8, 0, 8, 8], [0, 0, 5, 5, 5, 5, 0, 0]])
  positions = contract.token_positions(
    ids, jnp.array([3, 0]), jnp.array([10, 0]), 8
  )
  valid = np.asarray(ids) != 0
  expected = [[10, 11, 0, 12, 0, 0, 1, 2], [0, 0, 0, 1, 2, 3, 0, 0]]
  np.testing.assert_array_equal(
    np.asarray(positions)[valid], np.array(expected)[valid]
  )


def test_positions_without_segments_go_on():
  positions = contract.token_positions(
    None, jnp.array([1, 0]), jnp.array([4, 0]), 3
  )
  np.testing.assert_array_equal(positions, [[4, 5, 6], [0, 1, 2]])


def test_positions_of_segments_that_go_on_from_a_state():
  ids = jnp.array([[3, 3, 0, 3, 8, 0, 8, 8]])
  positions = contract.token_positions(
    ids, jnp.array([3]), jnp.array([10]), 8, jnp.array([4])
  )
  valid = np.asarray(ids[0] != 0)
  assert np.asarray(positions)[0][valid].tolist() == [10, 11, 12, 4, 5, 6]
