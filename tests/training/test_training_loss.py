import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rotation

from memcomp.training import loss

VOCAB, WIDTH = 11, 6


def _case(batch=3, time=10, ignored=0.3):
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(batch, time, WIDTH)).astype(np.float32)
  table = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
  targets = rng.integers(0, VOCAB, (batch, time))
  targets[rng.random(targets.shape) < ignored] = -1
  return hidden, table, targets.astype(np.int32)


@functools.partial(jax.jit, static_argnums=3)
def _sums(hidden, table, targets, chunk=0):
  return loss.next_token_loss(lambda h: h @ table, hidden, targets, chunk=chunk)


def test_is_the_cross_entropy_of_scored_tokens():
  hidden, table, targets = _case()
  sums = _sums(hidden, table, targets)
  scored = np.asarray(targets) >= 0
  each = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(
    hidden @ table, np.maximum(targets, 0)
  )
  each = np.asarray(each)
  log_z = np.asarray(
    jax.jit(jax.nn.logsumexp, static_argnums=1)(hidden @ table, -1)
  )
  assert int(sums.count) == scored.sum()
  best = np.argmax(hidden @ table, -1) == np.asarray(targets)
  assert int(sums.right) == (best & scored).sum() > 0
  np.testing.assert_allclose(sums.nll, each[scored].sum(), rtol=1e-6)
  np.testing.assert_allclose(
    sums.log_z_squared, (log_z[scored] ** 2).sum(), rtol=1e-6
  )


def test_of_equally_likely_tokens_one_is_right():
  """Otherwise a head of zeros, or bfloat16, would be right on all of them."""
  logits = jnp.array([[[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]] * 3)
  for dtype in (jnp.float32, jnp.bfloat16):
    for target in range(3):
      targets = jnp.full((3, 2), target)
      found = loss.next_token_loss(lambda x: x, logits.astype(dtype), targets)
      assert found.right == (jnp.argmax(logits, -1) == target).sum()


@pytest.mark.parametrize(
  "chunk", rotation.cases([1, 3, 4, 5, 9, 10, 99], [4, 99])
)
def test_chunks_change_nothing(chunk):
  hidden, table, targets = _case()

  def total(hidden, table, chunk):
    sums = _sums(hidden, table, targets, chunk)
    return sums.nll + 0.1 * sums.log_z_squared, (sums.count, sums.right)

  both = jax.jit(
    jax.value_and_grad(total, argnums=(0, 1), has_aux=True), static_argnums=2
  )
  (want, count), want_grads = both(hidden, table, 0)
  (got, chunk_count), grads = both(hidden, table, chunk)
  assert count == chunk_count
  np.testing.assert_allclose(got, want, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
    grads,
    want_grads,
  )


def test_chunks_keep_the_logits_of_one_chunk():
  hidden, table, targets = _case(batch=1, time=64)

  def total(hidden, chunk):
    return _sums(hidden, table, targets, chunk).nll

  def largest(chunk):
    text = jax.jit(jax.grad(total), static_argnums=1).lower(hidden, chunk)
    return f"x64x{VOCAB}x" in text.as_text()

  assert largest(0)
  assert not largest(16)


def test_ignored_tokens_get_no_gradient():
  hidden, table, targets = _case()
  grad = jax.jit(jax.grad(lambda h: _sums(h, table, targets).nll))(hidden)
  assert (np.asarray(grad)[np.asarray(targets) < 0] == 0).all()


def test_nothing_to_score_is_zero():
  hidden, table, _ = _case()
  sums = _sums(hidden, table, jnp.full((3, 10), -1, jnp.int32))
  assert float(sums.nll) == 0 and int(sums.count) == 0


def test_a_common_offset_of_the_logits_costs_no_digits():
  logits = jnp.array([[[0.0, 1e-3]]])
  target = jnp.array([[1]])
  near = loss.next_token_loss(lambda x: x, logits, target).nll
  far = loss.next_token_loss(lambda x: x + 4096.0, logits, target).nll
  # 4096.001 rounds to a multiple of 2**-11; log_z - logit would lose as much.
  exact = np.log1p(np.exp(-np.float64(np.float32(4096 + 1e-3) - 4096)))
  np.testing.assert_allclose(near, np.log1p(np.exp(-1e-3)), rtol=1e-6)
  np.testing.assert_allclose(far, exact, rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32():
  hidden, table, targets = _case(time=40)
  sums = loss.next_token_loss(
    lambda h: (h @ table).astype(jnp.bfloat16), hidden, targets
  )
  assert sums.nll.dtype == jnp.float32
