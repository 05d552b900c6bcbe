"""Level 1: the reference is the paper's test-time training."""

import dataclasses

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import ttt
from memcomp_kernels.test_time_training import inner, reference
from memcomp_kernels.testing import errors, memories

COMPILED = programs.of(ttt)
MEMORY = memories.MEMORIES["test_time_training"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 6, "value_dim": 6}


pytestmark = pytest.mark.usefixtures("float64")


def two_tokens(**fields):
  """Two tokens of two features, weights zero but for the bias (2, 0).

  norm_eps = 3, so that numbers come out even: z = (2, 0) has mean 1, variance
  1, s = sqrt(1 + 3) = 2 and h = (1/2, -1/2).
  """
  spec = ttt.Spec(norm_eps=3.0, **fields)
  state = ttt.init_state(
    spec, batch=1, heads=1, key_dim=2, value_dim=2, dtype=jnp.float64
  )
  (layer,) = state.layers
  layers = (layer._replace(bias=jnp.array([[[2.0, 0.0]]])),)
  state = state._replace(layers=layers, starts=layers if spec.chunked else None)
  inputs = ttt.Inputs(
    query=by_hand.one_head([1, 0], [0, 1]),
    key=by_hand.one_head([1, 0], [0, 2]),
    value=by_hand.one_head([1.5, 3.5], [0.5, 1.5]),
    log_decay=jnp.log(by_hand.one_head([0.5], [0.5])),
    write_rate=by_hand.one_head([4.0], [8.0]),
  )
  return spec, state, inputs


def test_chunk_start_by_hand():
  """Both gradients at the start, where z = (2, 0) whatever the key.

  Token 1: target v - k = (1/2, 7/2); LN(z) - target = (0, -4) = g. mean g =
    -2, mean(g h) = (0 + 2) / 2 = 1. u = (g + 2 - h) / 2 = (2 - 1/2, -2 + 1/2)
    / 2 = (3/4, -3/4). W = -4 k u = ((-3, 3), (0, 0)); b = (2, 0) + (-3, 3).
    Read q = (1, 0): z = (-3, 3) + (-1, 3) = (-4, 6); centred (-5, 5),
    s = sqrt(28).
  Token 2: target (1/2, -1/2), g = 0, u = 0: nothing is written.
    Read q = (0, 1): z = b = (-1, 3), centred (-2, 2), s = sqrt(7).
  """
  spec, state, inputs = two_tokens(chunk_size=2)
  state, y = COMPILED.reference(state, inputs, spec=spec)
  (layer,) = state.layers
  np.testing.assert_allclose(layer.weight[0, 0], [[-3, 3], [0, 0]], atol=1e-15)
  np.testing.assert_allclose(layer.bias[0, 0], [-1, 3])
  a, b = 5 / 28**0.5, 2 / 7**0.5
  np.testing.assert_allclose(y[0, :, 0], [[1 - a, a], [-b, 1 + b]])
  assert int(state.position[0]) == 0


def test_step_scale_by_hand():
  """As above with c = 1/2, then 1/4: the read and the next chunk's start.

  The way from the start is (W, b) = (((-3, 3), (0, 0)), (-3, 3)). After token 1
  half of it: z = (-3/2, 3/2) + (1/2, 3/2) = (-1, 3), centred (-2, 2), s =
  sqrt(7). After token 2 a quarter: z = b = (5/4, 3/4), centred (1/4, -1/4).
  """
  spec, state, inputs = two_tokens(chunk_size=2)
  inputs = inputs._replace(step_scale=by_hand.one_head([0.5], [0.25]))
  state, y = COMPILED.reference(state, inputs, spec=spec)
  (layer,) = state.layers
  expected = [[-0.75, 0.75], [0, 0]]
  np.testing.assert_allclose(layer.weight[0, 0], expected, atol=1e-15)
  np.testing.assert_allclose(layer.bias[0, 0], [1.25, 0.75])
  a, b = 2 / 7**0.5, 0.25 / (0.0625 + 3) ** 0.5
  np.testing.assert_allclose(y[0, :, 0], [[1 - a, a], [b, 1 - b]])


def test_per_token_with_decay_by_hand():
  """Token 1 as before, but the bias (2, 0) has halved: b = (1, 0) + (-3, 3).

  Token 2 is asked at these weights: k = (0, 2), z = b = (-2, 3), mean 1/2,
  variance 25/4, s = sqrt(37)/2, h = (-1, 1) 5 / sqrt(37).
  """
  spec, state, inputs = two_tokens(gradient_at="token", forget_gate=True)
  state, y = COMPILED.reference(state, inputs, spec=spec)
  s = 37**0.5 / 2
  h = np.array([-1, 1]) * 2.5 / s
  g = h - [0.5, -0.5]
  u = (g - g.mean() - h * (g * h).mean()) / s
  (layer,) = state.layers
  weight = np.array([[-1.5, 1.5], [0, 0]]) - 8 * np.outer([0, 2], u)
  np.testing.assert_allclose(layer.weight[0, 0], weight, atol=1e-15)
  np.testing.assert_allclose(layer.bias[0, 0], [-1, 1.5] - 8 * u)
  z = weight[1] + layer.bias[0, 0]
  centred = (z - z.mean()) / np.sqrt(z.var() + 3)
  np.testing.assert_allclose(y[0, 1, 0] - inputs.query[0, 1, 0], centred)


@pytest.mark.slow
def test_gradient_is_that_of_the_loss():
  """The closed form, against differentiating |f(k) - v|^2 / 2 itself."""
  spec = ttt.Spec(model="mlp", norm_eps=1e-3)
  state = MEMORY.make_state(jax.random.key(0), spec, **SIZES)
  k, v = jax.random.normal(jax.random.key(1), (2, 2, 2, 6))
  norm = state.norm_scale, state.norm_bias

  def loss(layers):
    error = reference.answer(layers, k, *norm, spec.norm_eps) - v
    return jnp.sum(error**2) / 2

  expected = jax.grad(loss)(state.layers)
  first, second = state.layers
  z = jnp.einsum("bhi,bhio->bho", k, first.weight) + first.bias
  hidden, slope = inner.gelu(z)
  z = jnp.einsum("bhi,bhio->bho", hidden, second.weight) + second.bias
  u = inner.gradient(spec.norm_eps, z, inner.Labels(v - k, *norm))
  back = slope * jnp.einsum("bho,bhio->bhi", u, second.weight)

  def layer(x, u):
    return reference.Layer(x[..., :, None] * u[..., None, :], u)

  for got, right in zip(
    jax.tree.leaves((layer(k, back), layer(hidden, u))),
    jax.tree.leaves(expected),
    strict=True,
  ):
    np.testing.assert_allclose(got, right, rtol=1e-10, atol=1e-12)


def inputs_for(spec, time=12):
  return MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)


def run(spec, inputs, seed=1, function=COMPILED.reference):
  state = MEMORY.make_state(jax.random.key(seed), spec, **SIZES)
  return function(state, inputs, spec=spec)


@pytest.mark.slow
def test_batch_gradient_descent_is_one_chunk():
  """One step at the start on the summed loss of all tokens (section 2.5)."""
  spec = ttt.Spec(model="mlp", chunk_size=12)
  inputs = inputs_for(spec)._replace(step_scale=None)
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)

  def loss(layers):
    total = 0.0
    for t in range(12):
      answer = reference.answer(
        layers,
        inputs.key[:, t],
        state.norm_scale,
        state.norm_bias,
        spec.norm_eps,
      )
      error = inputs.write_rate[:, t] * (answer - inputs.value[:, t]) ** 2
      total = total + jnp.sum(error) / 2
    return total

  expected = jax.tree.map(
    jnp.subtract, state.layers, jax.grad(loss)(state.layers)
  )
  final, _ = run(spec, inputs)
  for got, right in zip(
    jax.tree.leaves(final.layers), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(got, right, rtol=1e-10)


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_chunk_of_one_is_per_token(model):
  token = ttt.Spec(model=model, gradient_at="token")
  one = ttt.Spec(model=model, chunk_size=1)
  inputs = inputs_for(token)
  np.testing.assert_array_equal(run(token, inputs)[1], run(one, inputs)[1])


def test_chunk_size_is_meaning():
  spec = ttt.Spec(gradient_at="token")
  inputs = inputs_for(spec)
  exact, stale = (
    run(spec, inputs)[1],
    run(ttt.Spec(chunk_size=4), inputs)[1],
  )
  assert jnp.linalg.norm(exact - stale) > 0.01 * jnp.linalg.norm(exact)


def test_rate_zero_keeps_the_model_and_answers_with_it():
  spec = ttt.Spec(model="mlp")
  inputs = inputs_for(spec)
  inputs = inputs._replace(write_rate=0 * inputs.write_rate)
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)
  final, y = run(spec, inputs)
  for a, b in zip(*map(jax.tree.leaves, (final, state)), strict=True):
    if a.ndim > 1:
      np.testing.assert_array_equal(a, b)
  norm = state.norm_scale, state.norm_bias, spec.norm_eps
  expected = reference.answer(state.layers, inputs.query[:, 5], *norm)
  np.testing.assert_allclose(y[:, 5], expected, rtol=1e-12)


def test_step_scale_zero_keeps_the_model():
  spec = ttt.Spec(chunk_size=4)
  inputs = inputs_for(spec)
  none = inputs._replace(step_scale=0 * inputs.step_scale)
  still = none._replace(write_rate=0 * inputs.write_rate)
  for function in (COMPILED.reference, COMPILED.chunk):
    np.testing.assert_array_equal(
      run(spec, none, function=function)[1],
      run(spec, still, function=function)[1],
    )


def test_step_scale_one_is_none():
  spec = ttt.Spec(chunk_size=4, forget_gate=True)
  inputs = inputs_for(spec)
  ones = inputs._replace(step_scale=jnp.ones_like(inputs.step_scale))
  _, y = run(spec, ones)
  _, without = run(spec, inputs._replace(step_scale=None))
  np.testing.assert_allclose(y, without, rtol=1e-12)


def test_forget_gate_off_ignores_the_decay():
  spec = ttt.Spec()
  inputs = inputs_for(spec)
  other = inputs._replace(log_decay=5 * inputs.log_decay)
  np.testing.assert_array_equal(run(spec, inputs)[1], run(spec, other)[1])
  # With it, no decay is the same, and another one is not.
  on = dataclasses.replace(spec, forget_gate=True)
  still = inputs._replace(log_decay=0 * inputs.log_decay)
  errors.assert_close(run(on, still), run(spec, inputs), 1e-13)
  assert errors.relative_rms(run(on, inputs)[1], run(spec, inputs)[1]) > 1e-3


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_the_sequence_is_learned_online(model):
  """One pair again and again: the answer comes to be the value."""
  spec = ttt.Spec(model=model, gradient_at="token")
  inputs = inputs_for(spec, 200)
  inputs = jax.tree.map(
    lambda x: None if x is None else jnp.broadcast_to(x[:, :1], x.shape), inputs
  )
  # LN's outputs with scale 1 and bias 0 have mean 0 and variance 1: so must
  # what it is to answer.
  target = inputs.value - inputs.value.mean(-1, keepdims=True)
  target = target / jnp.sqrt(jnp.mean(target**2, -1, keepdims=True))
  inputs = inputs._replace(query=inputs.key, value=inputs.key + target)
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)
  state = state._replace(
    norm_scale=jnp.ones_like(state.norm_scale),
    norm_bias=jnp.zeros_like(state.norm_bias),
  )
  _, y = COMPILED.reference(state, inputs, spec=spec)
  error = jnp.linalg.norm(y - inputs.value, axis=-1)
  assert jnp.all(error[:, -1] < 0.05 * error[:, 0])


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("model", "cnn"),
    ("expansion", 0),
    ("gradient_at", "chunk"),
    ("chunk_size", 0),
    ("norm_eps", 0.0),
  ],
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    ttt.Spec(**{field: value})


def test_chunk_names_what_does_not_fit():
  spec = ttt.Spec()
  inputs = inputs_for(spec)
  state = ttt.init_state(spec, **SIZES)
  with pytest.raises(ValueError, match=r"value has shape .* expected"):
    ttt.chunk(state, inputs._replace(value=inputs.log_decay), spec=spec)
  with pytest.raises(ValueError, match=r"step_scale has shape .* expected"):
    ttt.chunk(state, inputs._replace(step_scale=inputs.key), spec=spec)
  token = ttt.Spec(gradient_at="token")
  with pytest.raises(ValueError, match=r"state\.starts is given, but chunked"):
    ttt.chunk(state, inputs, spec=token)
  with pytest.raises(ValueError, match="step_scale is given, but chunked"):
    ttt.chunk(ttt.init_state(token, **SIZES), inputs, spec=token)
  with pytest.raises(ValueError, match="the state has layers of"):
    ttt.chunk(state, inputs, spec=ttt.Spec(model="mlp"))
  with pytest.raises(NotImplementedError, match="no mosaic_gpu"):
    ttt.chunk(state, inputs, spec=spec, implementation="mosaic_gpu")
  with pytest.raises(ValueError, match="at least float32"):
    ttt.init_state(spec, **SIZES, dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match="must be equal"):
    ttt.init_state(spec, **(SIZES | {"key_dim": 5}))
