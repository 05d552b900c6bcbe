"""Level 1: Key-Value Means by hand: budgets, merges, the readout."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import key_value_means
from memcomp_kernels.key_value_means import budgets, capacity

COMPILED = programs.of(key_value_means)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
  ("budget", "rows"),
  [
    (budgets.FixedBudget(256), [256] * 7),
    (budgets.PowerLawBudget(), [443, 512, 724, 1024, 1448, 2048, 2896]),
    (budgets.SaturatingBudget(1024), [438, 512, 682, 819, 910, 963, 992]),
  ],
)
def test_published_sizes(budget, rows):
  spec = key_value_means.Spec(budget=budget)
  live = spec.live_rows(128)
  tokens = [768, 1024, 2048, 4096, 8192, 16384, 32768]
  assert [live[e // 256] for e in tokens] == rows
  # Rows are made by the first token of the next chunk.
  assert capacity(spec, 768) == 256
  assert capacity(spec, 769) == rows[0]
  assert capacity(spec, 1) == 256  # what a state has at least


def test_the_budget_stays_at_its_last_value():
  spec = key_value_means.Spec(
    chunk_size=4, max_length=18, budget=lambda tokens: 10 * tokens
  )
  # B(16) = 160 is the last value; what leaves the window is 4 rows a chunk.
  assert spec.live_rows(50)[-3:] == (160, 160, 160)
  assert spec.limits == (40, 80, 120, 160)


def test_growth_is_at_most_a_chunk_a_chunk():
  def jumps(tokens):
    return 4 if tokens < 20 else 100

  spec = key_value_means.Spec(chunk_size=4, window_chunks=1, budget=jumps)
  assert spec.live_rows(7) == (0, 4, 4, 4, 4, 8, 12, 16)


def by_hand(spec, keys, values, gates, query=None):
  """One head, one row, value_dim 1; LN_s is the identity on these keys."""
  state = key_value_means.init_state(
    spec, batch=1, heads=1, key_dim=3, value_dim=1, dtype=jnp.float64
  )
  column = [jnp.array(x, jnp.float64)[None, :, None] for x in (values, gates)]
  keys = jnp.array(keys, jnp.float64)[None, :, None]
  inputs = key_value_means.Inputs(
    jnp.zeros_like(keys) if query is None else query,
    keys,
    *(x[..., None] for x in column),
  )
  state, y = COMPILED.reference(state, inputs, spec=spec)
  rows = int(state.length[0])
  return (
    state.keys[0, 0, :rows],
    state.values[0, 0, :rows, 0],
    state.radii[0, 0, :rows],
    y[0, :, 0, 0],
  )


U = np.array([1, -1, 0]) * np.sqrt(1.5)
W = np.array([1, 1, -2]) / np.sqrt(2)  # U and W have mean 0 and variance 1
SMALL = key_value_means.Spec(
  chunk_size=2,
  window_chunks=1,
  rotary_dim=0,
  budget=budgets.FixedBudget(3),
  max_length=64,
  norm_eps=1e-12,
)


def test_append_and_merge_by_hand():
  """Rows u, -u; then w, gate 2, and u, gate 3, leave the window.

  Room for one: w is new (similarity 0 against 3). Then u may not join the
  sink, its twin; of -u (-3) and the new row w (0) it joins the latter.
  """
  rows = by_hand(SMALL, [U, -U, W, U, U], [5, 7, -11, 13, 17], [9, 9, 2, 3, 9])
  np.testing.assert_allclose(rows[0], [U, -U, W + 3 * U], atol=1e-9)
  np.testing.assert_allclose(rows[1], [5, 7, -11 + 3 * 13])
  np.testing.assert_allclose(rows[2], [5, 7, 11])
  # A query of zeros weighs all rows and the one token of its chunk alike; the
  # third row's sum is positive, its radius 11.
  np.testing.assert_allclose(rows[3][4], (5 + 7 + 11 + 17) / 4)


def test_gated_appends_by_hand():
  spec = dataclasses.replace(SMALL, gate_appends=True)
  rows = by_hand(spec, [U, -U, W, U, U], [5, 7, -11, 13, 17], [9, 9, 2, 3, 9])
  # The first rows are never gated.
  np.testing.assert_allclose(rows[0], [U, -U, 2 * W + 3 * U], atol=1e-9)
  np.testing.assert_allclose(rows[1], [5, 7, -22 + 3 * 13])
  np.testing.assert_allclose(rows[2], [5, 7, 22])


def test_counts_by_hand():
  spec = dataclasses.replace(SMALL, value_radius=False)
  rows = by_hand(spec, [U, -U, W, U, U], [5, 7, -11, 13, 17], [9, 9, 2, 3, 9])
  np.testing.assert_array_equal(rows[2], [1, 1, 2])
  np.testing.assert_allclose(rows[3][4], (5 + 7 + 28 / 2 + 17) / 4)


def test_no_sink_by_hand():
  spec = dataclasses.replace(SMALL, sink_rows=0)
  rows = by_hand(spec, [U, -U, W, U, U], [5, 7, -11, 13, 17], [9, 9, 2, 3, 9])
  np.testing.assert_allclose(rows[0], [4 * U, -U, W], atol=1e-9)
  np.testing.assert_allclose(rows[1], [5 + 39, 7, -11])


def test_readout_by_hand():
  """Temperatures and the logits' scale, in one softmax."""
  tau = jnp.array([[2.0, 0.5]])
  state = key_value_means.init_state(
    SMALL,
    batch=1,
    heads=1,
    key_dim=3,
    value_dim=1,
    dtype=jnp.float64,
    temperatures=tau,
  )
  keys = jnp.array([U, W, 2 * U])[None, :, None]
  query = jnp.array([U + W] * 3)[None, :, None]
  values = jnp.array([5.0, 7.0, 11.0])[None, :, None, None]
  inputs = key_value_means.Inputs(query, keys, values, jnp.ones_like(values))
  _, y = COMPILED.reference(state, inputs, spec=SMALL)
  # Token 2 begins a chunk: rows u and w (logits 3 each), itself (logit 6).
  weights = np.exp(np.array([2 * 3, 2 * 3, 0.5 * 6]) / np.sqrt(3))
  expected = weights @ [5, 7, 11] / weights.sum()
  np.testing.assert_allclose(y[0, 2, 0, 0], expected, rtol=1e-9)
