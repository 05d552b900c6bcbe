"""Level 1: the reference is the papers' (gated) delta rule."""

import dataclasses

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import delta_rule
from memcomp_kernels.chunking import form
from memcomp_kernels.testing import errors, memories

COMPILED = programs.of(delta_rule)
MEMORY = memories.MEMORIES["delta_rule"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 6, "value_dim": 5}
GATED, PLAIN = delta_rule.Spec(), delta_rule.Spec(forget_gate=False)


pytestmark = pytest.mark.usefixtures("float64")


def inputs_for(spec=GATED, time=12, seed=0):
  return MEMORY.make_inputs(jax.random.key(seed), spec, time=time, **SIZES)


def run(inputs, spec=GATED, function=COMPILED.reference):
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)
  return function(state, inputs, spec=spec)


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_by_hand(function):
  """Two tokens of two features, read at scale 1.

  Token 1: k = (1, 0), v = 4, beta = 1/2. S = 0, so the error is 4: S = (2, 0).
    Read q = (1, 1): 2.
  Token 2: alpha = 1/2, so S = (1, 0). k = (1, 1), v = 7, beta = 1: the error is
    7 - 1 = 6 and S = (7, 6). Read q = (1, 0): 7.
  Without the gate S stays (2, 0), the error is 5 and S = (7, 5).
  """
  inputs = delta_rule.Inputs(
    query=by_hand.one_head([1, 1], [1, 0]),
    key=by_hand.one_head([1, 0], [1, 1]),
    value=by_hand.one_head([4], [7]),
    log_decay=jnp.log(by_hand.one_head([0.3], [0.5])),
    write_rate=by_hand.one_head([0.5], [1.0]),
  )
  for gated, expected in ((True, [7, 6]), (False, [7, 5])):
    spec = delta_rule.Spec(forget_gate=gated, scale=1.0)
    state = delta_rule.init_state(
      spec, batch=1, heads=1, key_dim=2, value_dim=1, dtype=jnp.float64
    )
    state, o = function(state, inputs, spec=spec)
    np.testing.assert_allclose(state.memory[0, 0, :, 0], expected, rtol=1e-14)
    np.testing.assert_allclose(o[0, :, 0, 0], [2, 7], rtol=1e-14)


def test_write_is_a_gradient_step_after_the_decay():
  inputs = inputs_for(time=1)
  state = MEMORY.make_state(jax.random.key(1), GATED, **SIZES)
  decayed = jnp.exp(inputs.log_decay[:, 0, :, :, None]) * state.memory

  def loss(memory):
    answer = jnp.einsum("bhkv,bhk->bhv", memory, inputs.key[:, 0])
    return jnp.sum((answer - inputs.value[:, 0]) ** 2) / 2

  rate = inputs.write_rate[:, 0, :, :, None]
  expected = decayed - rate * jax.grad(loss)(decayed)
  final, _ = run(inputs)
  np.testing.assert_allclose(final.memory, expected, rtol=1e-12, atol=1e-14)


def test_transition_matrix_form():
  """S_t = (I - beta k k^T) alpha S_{t-1} + beta k v^T, as the papers have it."""
  inputs = inputs_for()
  S = MEMORY.make_state(jax.random.key(1), GATED, **SIZES).memory
  for t in range(12):
    q, k, v, log_alpha, beta = (x[:, t] for x in inputs)
    reflect = jnp.eye(6) - beta[..., None] * k[..., :, None] * k[..., None, :]
    S = reflect @ (jnp.exp(log_alpha)[..., None] * S)
    S = S + (beta * k)[..., :, None] * v[..., None, :]
  final, o = run(inputs)
  np.testing.assert_allclose(final.memory, S, rtol=1e-11, atol=1e-13)
  read = jnp.einsum("bhkv,bhk->bhv", S, q) * 6**-0.5
  np.testing.assert_allclose(o[:, -1], read, rtol=1e-11, atol=1e-13)


def test_rate_one_answers_the_last_value():
  inputs = inputs_for()
  inputs = inputs._replace(
    write_rate=jnp.ones_like(inputs.write_rate), query=inputs.key
  )
  spec = dataclasses.replace(GATED, scale=1.0)
  for function in (COMPILED.reference, COMPILED.chunk):
    _, o = run(inputs, spec, function)
    np.testing.assert_allclose(o, inputs.value, rtol=1e-10, atol=1e-12)


def test_rate_two_reflects():
  """With a value of zero, what answers k is turned around."""
  inputs = inputs_for(time=1)
  inputs = inputs._replace(
    write_rate=2 + 0 * inputs.write_rate, value=0 * inputs.value
  )
  before = MEMORY.make_state(jax.random.key(1), PLAIN, **SIZES).memory
  final, _ = run(inputs, PLAIN)

  def answer(memory):
    return jnp.einsum("bhkv,bhk->bhv", memory, inputs.key[:, 0])

  np.testing.assert_allclose(
    answer(final.memory), -answer(before), rtol=1e-10, atol=1e-12
  )


def test_orthogonal_keys_are_linear_attention():
  """Nothing to correct: S is the sum of outer products."""
  keys = jnp.eye(6)[None, :, None] + jnp.zeros((2, 1, 2, 1))
  inputs = inputs_for(time=6)._replace(key=keys)
  state = MEMORY.make_state(jax.random.key(1), PLAIN, **SIZES)
  state = state._replace(memory=0 * state.memory)
  final, _ = COMPILED.reference(state, inputs, spec=PLAIN)
  written = inputs.write_rate * inputs.value
  np.testing.assert_allclose(
    final.memory, jnp.einsum("bthk,bthv->bhkv", keys, written), rtol=1e-12
  )


def test_forget_gate_off_ignores_the_decay():
  inputs = inputs_for()
  other = inputs._replace(log_decay=5 * inputs.log_decay)
  plain = run(inputs, PLAIN)
  np.testing.assert_array_equal(plain[1], run(other, PLAIN)[1])
  # With it, no decay is the same, and another one is not.
  still = inputs._replace(log_decay=0 * inputs.log_decay)
  errors.assert_close(run(still), plain, 1e-13)
  assert errors.relative_rms(run(inputs)[1], plain[1]) > 0.01


def test_scale_scales_the_read_only():
  inputs = inputs_for()
  twice = delta_rule.Spec(scale=2 * 6**-0.5)
  (state, o), (other, o2) = run(inputs), run(inputs, twice)
  np.testing.assert_array_equal(state.memory, other.memory)
  np.testing.assert_allclose(o2, 2 * o, rtol=1e-12)


def test_bad_values_are_named():
  with pytest.raises(ValueError, match="scale="):
    delta_rule.Spec(scale=0.0)
  with pytest.raises(ValueError, match="tile_time="):
    form.Tiling(tile_time=0)
  with pytest.raises(ValueError, match="at least float32"):
    delta_rule.init_state(GATED, **SIZES, dtype=jnp.bfloat16)


def test_chunk_names_what_does_not_fit():
  inputs = inputs_for()
  state = delta_rule.init_state(GATED, **SIZES)
  for name in ("query", "key", "value", "log_decay", "write_rate"):
    wrong = inputs._replace(**{name: jnp.zeros((2, 12, 2, 9))})
    with pytest.raises(ValueError, match=rf"{name} has shape .* expected"):
      delta_rule.chunk(state, wrong, spec=GATED)
  with pytest.raises(NotImplementedError, match="no library_gpu"):
    delta_rule.chunk(state, inputs, spec=GATED, implementation="library_gpu")
