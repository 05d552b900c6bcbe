"""The short convolution: by hand, cut anywhere, packed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers.short_convolution import (
  ShortConvolution,
  short_convolution,
)


def operands(time, channels=3, width=4, batch=1, seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  x = jax.random.normal(keys[0], (batch, time, channels))
  weight = jax.random.normal(keys[1], (width, channels))
  bias = jax.random.normal(keys[2], (channels,))
  return x, weight, bias, jnp.zeros((batch, width - 1, channels))


def test_by_hand():
  x = jnp.array([[[1.0], [2.0], [3.0]]])
  weight = jnp.array([[10.0], [1.0]])  # previous, current
  y, taps = short_convolution(x, weight, jnp.array([0.5]), jnp.zeros((1, 1, 1)))
  np.testing.assert_allclose(y[0, :, 0], [1.5, 12.5, 23.5])
  np.testing.assert_allclose(taps[0, :, 0], [3.0])


@pytest.mark.parametrize(
  ("cut", "packed"),
  rotation.cases(
    list(itertools.product(range(1, 9), [False, True])),
    [(1, True)],
  ),
)
def test_cut_anywhere(cut, packed):
  x, weight, bias, taps = operands(9)
  ids = jnp.ones((1, 9), jnp.int32) if packed else None

  def run(taps, start, stop):
    if not packed:
      return short_convolution(x[:, start:stop], weight, bias, taps)
    return short_convolution(
      x[:, start:stop],
      weight,
      bias,
      taps,
      segment_ids=ids[:, start:stop],
      segment_id=jnp.array([min(start, 1)]),
    )

  @jax.jit
  def whole_and_pieces(taps):
    first, middle = run(taps, 0, cut)
    second, last = run(middle, cut, 9)
    return run(taps, 0, 9), (jnp.concatenate([first, second], axis=1), last)

  (whole, last), (pieces, last_of_pieces) = whole_and_pieces(taps)
  np.testing.assert_allclose(pieces, whole, rtol=1e-6)
  np.testing.assert_array_equal(last_of_pieces, last)


def test_packed_rows_equal_their_segments_values_and_gradients():
  x, weight, bias, taps = operands(12)
  # Padding before, inside a segment, between and after; a segment of one token.
  ids = [0, 4, 4, 0, 4, 4, 9, 2, 2, 2, 0, 0]
  segments = [[1, 2, 4, 5], [6], [7, 8, 9]]

  def packed(x, weight, bias):
    y, last = short_convolution(
      x,
      weight,
      bias,
      taps,
      segment_ids=jnp.array([ids]),
      segment_id=jnp.array([0]),
    )
    return [y[:, jnp.array(s)] for s in segments], last

  def separate(x, weight, bias):
    results = [
      short_convolution(x[:, jnp.array(s)], weight, bias, taps)
      for s in segments
    ]
    return [y for y, _ in results], results[-1][1]

  def objective(function):
    def total(*args):
      leaves = jax.tree.leaves(function(*args))
      return sum(jnp.sum(jnp.sin(i + leaf)) for i, leaf in enumerate(leaves))

    return function(x, weight, bias), jax.grad(total, argnums=(0, 1, 2))(
      x, weight, bias
    )

  found, expected = jax.jit(lambda: (objective(packed), objective(separate)))()
  jax.tree.map(
    lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-6),
    found,
    expected,
  )


def test_padding_leaves_the_taps_alone():
  x, weight, bias, _ = operands(5, batch=2)
  taps = jax.random.normal(jax.random.key(5), (2, 3, 3))
  _, after = short_convolution(
    x,
    weight,
    bias,
    taps,
    segment_ids=jnp.zeros((2, 5), jnp.int32),
    segment_id=jnp.array([1, 7]),
  )
  np.testing.assert_array_equal(after, taps)


def test_a_segment_goes_on_in_the_next_call():
  x, weight, bias, taps = operands(6)
  convolve = jax.jit(short_convolution)
  whole, _ = convolve(x, weight, bias, taps)
  _, taps = convolve(
    x[:, :2],
    weight,
    bias,
    taps,
    segment_ids=jnp.array([[5, 5]]),
    segment_id=jnp.array([0]),
  )
  for segment, same in ((5, True), (6, False)):
    y, _ = convolve(
      x[:, 2:],
      weight,
      bias,
      taps,
      segment_ids=jnp.full((1, 4), segment),
      segment_id=jnp.array([5]),
    )
    assert np.allclose(y, whole[:, 2:], rtol=1e-6) == same


@pytest.mark.parametrize("width", [2, 6])
def test_taps_of_another_width_are_refused(width):
  """Wider ones would be read as if they were these."""
  ours, other = (ShortConvolution(3, n, rngs=nnx.Rngs(0)) for n in (4, width))
  said = (
    rf"state: its convolution has \[taps, channels\]=\({width - 1}, 3\), exp"
  )
  with pytest.raises(ValueError, match=said):
    ours(jnp.zeros((1, 5, 3)), other.init_state(1))
