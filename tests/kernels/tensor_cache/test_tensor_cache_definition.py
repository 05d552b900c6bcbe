"""Level 1: the reference is the paper's Tensor Cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensor_cache_by_hand import (
  COMPILED,
  TIME,
  by_hand,
  drawn,
  every,
  evicted,
  fresh,
  holding,
  numbers,
  reads,
)

pytestmark = pytest.mark.usefixtures("float64")


def test_eviction_by_hand():
  """Two tokens of window, scalars: arithmetic on paper."""
  inputs = by_hand([1, 2, 3, 4, 5], [1, 10, 100, 1000, 1e4])
  # Token 2 evicts token 0: A = 1 * 1. Token 3 evicts token 1: A = 0.5 * 1 +
  # 2 * 10 = 20.5. Token 4 evicts token 2: A = 10.25 + 300.
  r, A = reads(evicted(window_size=2), inputs)
  np.testing.assert_allclose(r[:, 0], [0, 0, 0, 1, 20.5])
  np.testing.assert_allclose(A, [[310.25]])
  r, A = reads(evicted(window_size=2, read_after_write=True), inputs)
  np.testing.assert_allclose(r[:, 0], [0, 0, 1, 20.5, 310.25])
  # One sink: token 0 stays, the ring holds one token.
  r, A = reads(evicted(window_size=2, sink_tokens=1), inputs)
  np.testing.assert_allclose(r[:, 0], [0, 0, 0, 20, 310])
  np.testing.assert_allclose(A, [[4155]])


def test_nothing_evicted_nothing_decays():
  inputs = by_hand([1, 1, 1], [5, 5, 5])
  spec = evicted(window_size=2)
  r, A = reads(spec, inputs, holding(spec, 8.0))
  np.testing.assert_allclose(r[:, 0], [8, 8, 8])
  np.testing.assert_allclose(A, [[8 * 0.5 + 5]])


def test_delta_predicts_from_the_memory_before_its_decay():
  spec = evicted(window_size=1, rule="delta")
  inputs = by_hand([1, 1], [6, 6], decay=0.5, rate=0.5)
  # The error is 6 - 2 = 4, not 6 - 0.5 * 2: A = 0.5 * 2 + 0.5 * 4.
  _, A = reads(spec, inputs, holding(spec, 2.0))
  np.testing.assert_allclose(A, [[3.0]])


@pytest.mark.parametrize("sinks", [0, 2])
def test_local_attention_is_a_softmax_over_the_window(sinks):
  spec = evicted(sink_tokens=sinks)
  inputs = drawn(spec)
  q, k, v, _, _ = numbers(inputs)
  _, y = COMPILED.reference(fresh(spec, 4, 4), inputs, spec=spec)
  for t in range(TIME):
    seen = [j for j in range(t + 1) if j < sinks or t - j < 4 - sinks]
    p = np.exp(k[seen] @ q[t] / np.sqrt(4))
    expected = p / p.sum() @ v[seen]
    np.testing.assert_allclose(y[0, t, 0, :4], expected, rtol=1e-12)


@pytest.mark.parametrize("rule", ["outer", "delta", "wedge"])
def test_up_to_the_window_it_is_causal_attention(rule):
  inputs = drawn(evicted(rule=rule), time=4)
  r, A = reads(evicted(rule=rule), inputs)
  assert not r.any() and not A.any()


def written(k, u, rule):
  contribution = np.outer(k, u)
  return contribution - contribution.T if rule == "wedge" else contribution


@pytest.mark.parametrize("rule", ["outer", "delta", "wedge"])
def test_the_streaming_step_as_a_loop(rule):
  """(3), (4), (14) in numpy, over what left the window."""
  spec = evicted(rule=rule)
  inputs = drawn(spec)
  q, k, v, lam, eta = numbers(inputs)
  A, expected = np.zeros((4, 4)), []
  for t in range(TIME):
    expected.append(q[t] @ A)
    if t >= 4:
      e = t - 4
      u = v[e] - k[e] @ A if rule == "delta" else v[e]
      A = lam[t] * A + eta[t] * written(k[e], u, rule)
  r, final = reads(spec, inputs)
  np.testing.assert_allclose(r, expected, atol=1e-13)
  np.testing.assert_allclose(final, A, atol=1e-13)


@pytest.mark.parametrize("rule", ["outer", "delta", "wedge"])
def test_the_training_forward_as_a_weighted_sum(rule):
  """(8), (9): A <- lambda^C A + eta sum_i lambda^(C-i) k_i (x) u_i."""
  spec = every(rule=rule)
  inputs = drawn(spec, time=9)
  constant = jnp.ones_like(inputs.log_decay)
  inputs = inputs._replace(
    log_decay=jnp.log(0.9) * constant, write_rate=0.3 * constant
  )
  q, k, v, _, _ = numbers(inputs)
  A, expected = np.zeros((4, 4)), []
  for start in range(0, 9, 4):
    here = range(start, min(start + 4, 9))
    new = 0.9 ** len(here) * A
    for i, t in enumerate(here):
      expected.append(q[t] @ A)
      u = v[t] - k[t] @ A if rule == "delta" else v[t]
      new += 0.3 * 0.9 ** (len(here) - 1 - i) * written(k[t], u, rule)
    A = new
  r, final = reads(spec, inputs)
  np.testing.assert_allclose(r, expected, atol=1e-13)
  np.testing.assert_allclose(final, A, atol=1e-13)


def test_the_scan_of_a_chunk_is_the_loop_of_outer_writes():
  spec = every()
  inputs = drawn(spec)
  _, k, v, lam, eta = numbers(inputs)
  A = np.zeros((4, 4))
  for t in range(TIME):
    A = lam[t] * A + eta[t] * np.outer(k[t], v[t])
  np.testing.assert_allclose(reads(spec, inputs)[1], A, atol=1e-13)
  assert np.abs(reads(every(rule="delta"), inputs)[1] - A).max() > 0.01


def test_chunks_of_one_make_the_delta_rule_exact():
  inputs = drawn(every())
  _, k, v, lam, eta = numbers(inputs)
  A = np.zeros((4, 4))
  for t in range(TIME):
    A = lam[t] * A + eta[t] * np.outer(k[t], v[t] - k[t] @ A)
  exact = reads(every(rule="delta", chunk_size=1), inputs)[1]
  np.testing.assert_allclose(exact, A, atol=1e-13)
  stale = reads(every(rule="delta"), inputs)[1]
  assert np.linalg.norm(stale - A) > 0.01 * np.linalg.norm(A)


def test_chunk_mean_by_hand():
  """Means 2 and 30 of a chunk of two, then a third token alone."""
  spec = every(chunk_size=2, chunk_mean=True)
  inputs = by_hand([1, 3, 5], [20, 40, 7], rate=0.1)
  r, A = reads(spec, inputs, holding(spec, 8.0))
  # 0.5 * 8 + 0.1 * 2 * 30 = 10; the short chunk: 0.5 * 10 + 0.1 * 5 * 7.
  np.testing.assert_allclose(r[:, 0], [8, 8, 10])
  np.testing.assert_allclose(A, [[8.5]])


def test_chunk_mean_has_spurious_terms():
  """(7): mean(k) (x) mean(v) is the sum over all pairs, over C^2."""
  inputs = drawn(every(), time=4)
  _, k, v, _, eta = numbers(inputs)
  mean = reads(every(chunk_mean=True), inputs)[1]
  exact = reads(every(), inputs)[1]
  pairs = sum(np.outer(k[i], v[j]) for i in range(4) for j in range(4))
  np.testing.assert_allclose(mean, eta[3] * pairs / 16, atol=1e-13)
  assert np.linalg.norm(mean - exact) > 0.3 * np.linalg.norm(exact)


@pytest.mark.parametrize("spec", [evicted(rule="wedge"), every(rule="wedge")])
def test_the_wedge_memory_is_antisymmetric(spec):
  _, A = reads(spec, drawn(spec))
  assert np.abs(A).max() > 0.1
  np.testing.assert_allclose(A, -A.T, atol=1e-14)


def test_a_wedge_read_by_hand():
  """q (k (x) v - v (x) k) = <q, k> v - <q, v> k."""
  spec = evicted(window_size=1, rule="wedge", read_after_write=True)
  inputs = drawn(spec, time=2)
  q, k, v, _, eta = numbers(inputs)
  expected = eta[1] * ((q[1] @ k[0]) * v[0] - (q[1] @ v[0]) * k[0])
  np.testing.assert_allclose(reads(spec, inputs)[0][1], expected, atol=1e-14)


@pytest.mark.parametrize("after", [False, True])
def test_a_token_is_invisible_for_one_step(after):
  """At t the window ends at t - W + 1; the memory begins at t - W - 1."""
  spec = evicted(read_after_write=after)
  inputs = drawn(spec, time=9)

  def last(value):
    y = COMPILED.reference(
      fresh(spec, 4, 4), inputs._replace(value=value), spec=spec
    )[1]
    return y[0, -1, 0]

  sensitive = np.abs(jax.jacobian(last)(inputs.value)).max(axis=(1, 3, 4))
  local, memory = (part.any(axis=0) for part in (sensitive[:4], sensitive[4:]))
  np.testing.assert_array_equal(local, np.arange(9) >= 5)
  np.testing.assert_array_equal(memory, np.arange(9) <= (4 if after else 3))


def test_a_chunk_may_be_longer_than_the_window():
  """Scalars: nothing is seen of tokens 0 and 1 before token 3."""
  inputs = by_hand([1, 2, 3, 4, 5], [1, 10, 100, 1000, 1e4])
  spec = every(window_size=1, chunk_size=3)
  _, y = COMPILED.reference(fresh(spec, 1, 1), inputs, spec=spec)
  # Of keys 1, 2, 3 with a decay of .5: 0.25 * 1 + 0.5 * 20 + 300.
  memory, local = 310.25, [1, 10, 100, 1000, 1e4]
  np.testing.assert_allclose(y[0, :, 0, 0], local)
  np.testing.assert_allclose(y[0, :, 0, 1], [0, 0, 0, memory, memory])
