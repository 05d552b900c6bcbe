"""Token shift: by hand, packed, handed on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp.layers import token_shift
from memcomp_kernels.testing import errors


def inputs(time, seed=0):
  return jax.random.normal(jax.random.key(seed), (1, time, 3))


AMOUNT = jnp.array([0.0, 0.25, 1.0])


def shift(x, last=None, ids=None, segment=0, first="zero"):
  last = jnp.zeros((1, 3)) if last is None else last
  return token_shift.token_shift(
    x,
    AMOUNT,
    last,
    segment_ids=None if ids is None else jnp.array([ids]),
    segment_id=jnp.array([segment]),
    first=first,
  )


@pytest.mark.parametrize("first", ["zero", "itself"])
def test_by_hand(first):
  x = np.array(inputs(4))
  before = np.concatenate(
    [np.zeros((1, 1, 3)) if first == "zero" else x[:, :1], x[:, :-1]], 1
  )
  y, last = shift(jnp.array(x), first=first)
  expected = np.array(AMOUNT) * before + (1 - np.array(AMOUNT)) * x
  np.testing.assert_allclose(y, expected, atol=1e-6)
  np.testing.assert_array_equal(last, x[:, -1])


@pytest.mark.parametrize("first", ["zero", "itself"])
def test_packed_rows_equal_their_segments(first):
  a, b = inputs(5), inputs(3, seed=1)
  gap = jnp.full((1, 2, 3), 7.0)
  row = jnp.concatenate([gap, a[:, :2], gap, a[:, 2:], b, gap], 1)
  ids = [0, 0, 4, 4, 0, 0, 4, 4, 4, 2, 2, 2, 0, 0]
  y, last = shift(row, ids=ids, first=first)
  got = jnp.concatenate([y[:, 2:4], y[:, 6:9]], 1), y[:, 9:12]
  alone = shift(a, first=first)[0], shift(b, first=first)[0]
  errors.assert_close(got, alone, 1e-6)
  errors.assert_equal(last, b[:, -1])


@pytest.mark.parametrize("cut", [1, 3])
def test_handed_on(cut):
  x = inputs(5)
  whole, last = shift(x, first="itself")
  one, state = shift(x[:, :cut], first="itself")
  two, state = shift(
    x[:, cut:], last=state, ids=[1] * (5 - cut), segment=1, first="itself"
  )
  errors.assert_equal((jnp.concatenate([one, two], 1), state), (whole, last))


def test_padding_leaves_the_state_alone():
  last = inputs(1)[:, 0]
  _, after = shift(inputs(3, seed=2), last=last, ids=[0, 0, 0], segment=5)
  errors.assert_equal(after, last)


def test_amounts_by_depth():
  module = token_shift.TokenShift(4, exponent=0.7, first="zero")
  module.at_depth(0.5)
  expected = 1 - (np.arange(4) / 4) ** 0.35
  np.testing.assert_allclose(module.amount[...], expected, rtol=1e-5)
