"""Layers whose parameters have any dtype, in programs that forbid promotion."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import registry

OFTEN = ("trellis", "lattice", "key_value_means", "tensor_cache")

X = jax.ShapeDtypeStruct((2, 8, 64), jnp.float32)


def cast(name, dtype):
  """The layer of 64 features whose parameters were cast."""
  layer = registry.MIXERS[name](64, rngs=nnx.Rngs(0))
  parameters = nnx.state(layer, nnx.Param)
  nnx.update(layer, jax.tree.map(lambda p: p.astype(dtype), parameters))
  return layer


@pytest.mark.parametrize(
  "dtype",
  rotation.cases(["bfloat16", "float16", "float64"], ["bfloat16", "float64"]),
)
@pytest.mark.parametrize("name", rotation.cases(registry.MIXERS, OFTEN))
def test_parameters_may_have_any_dtype(name, dtype):
  """The state of a layer that was cast has float32, or more if they have."""

  def whole(x):
    layer = cast(name, dtype)
    ids = jnp.ones(x.shape[:2], jnp.int32)
    y, state = layer(x, layer.init_state(2), segment_ids=ids)
    y_t, state = layer.step(x[:, 0], state)
    return y, layer(x), y_t, state

  with jax.enable_x64(True):
    x = jax.ShapeDtypeStruct(X.shape, dtype)
    *outputs, state = jax.eval_shape(whole, x)
  assert {y.dtype.name for y in outputs} == {dtype}
  dtypes = {x.dtype.name for x in jax.tree.leaves(state)}
  wide = "float64" if dtype == "float64" else "float32"
  assert dtypes - {"int32"} == {wide}


@pytest.mark.parametrize(
  "name", rotation.cases(list(registry.MIXERS), ["gated_delta_net"])
)
def test_a_state_in_float64_loses_nothing(name):
  """Whole, cut into two and token by token, to the rounding of float64."""
  call = nnx.jit(lambda layer, x, state: layer(x, state))
  one = nnx.jit(lambda layer, x, state: layer.step(x, state))
  with jax.enable_x64(True):
    layer = cast(name, "float64")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 22, 64)))
    whole, _ = call(layer, x, layer.init_state(2))
    first, state = call(layer, x[:, :11], layer.init_state(2))
    rest, _ = call(layer, x[:, 11:], state)
    tokens, state = [], layer.init_state(2)
    for t in range(x.shape[1]):
      y, state = one(layer, x[:, t], state)
      tokens.append(y)
    cut = jnp.concatenate([first, rest], axis=1)
    scale = jnp.max(jnp.abs(whole))
    np.testing.assert_allclose(cut / scale, whole / scale, atol=1e-13)
    by_token = jnp.stack(tokens, axis=1)
    np.testing.assert_allclose(by_token / scale, whole / scale, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  list(registry.MIXERS),
)
def test_in_float64_the_gradient_is_the_slope(name):
  """What a layer cuts to float32 on its way makes steps a thousand times larger.

  The direction is random in the input and in all parameters.
  """
  with jax.enable_x64(True):
    graph, parameters, others = nnx.split(cast(name, "float64"), nnx.Param, ...)
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=(2, 22, 64))) for _ in range(2))
    start = parameters, x
    direction = jax.tree.map(
      lambda p: (0.1 + p.std()) * rng.normal(size=p.shape), start
    )

    @jax.jit
    @jax.value_and_grad
    def value_and_slope(distance):
      parameters, x = jax.tree.map(
        lambda p, d: p + distance * d, start, direction
      )
      return jnp.sum(weights * nnx.merge(graph, parameters, others)(x))

    _, slope = value_and_slope(0.0)
    e = 3e-6
    difference = value_and_slope(e)[0] - value_and_slope(-e)[0]
    np.testing.assert_allclose(difference / (2 * e), slope, rtol=1e-6)


@pytest.mark.parametrize("name", rotation.cases(registry.MIXERS, OFTEN))
@pytest.mark.parametrize(
  "dtype", rotation.cases(["float32", "bfloat16"], ["bfloat16"])
)
def test_a_program_may_forbid_promotion(name, dtype):
  """Of dtypes and of ranks, of its own arrays; with parameters of a dtype."""
  ids = jnp.ones(X.shape[:2], jnp.int32)

  def whole(x):
    layer = cast(name, dtype)
    y, state = layer(x, layer.init_state(2), segment_ids=ids)
    y_t, _ = layer.step(x[:, 0], layer.init_state(2))
    y_and_state = layer.with_stats(x, layer.init_state(2), segment_ids=ids)
    with contextlib.suppress(NotImplementedError):  # no value residual
      layer.value_of(x)
    gradient = jax.grad(lambda x: layer(x).astype(jnp.float32).sum())(x)
    return gradient, y, y_t, state, y_and_state

  x = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    dx, y, y_t, *_ = jax.eval_shape(whole, x)
    assert dx.dtype == y.dtype == y_t.dtype == x.dtype


@pytest.mark.parametrize("name", rotation.cases(registry.MIXERS, OFTEN[2:]))
def test_floats_of_numpy(name):
  """Its float64 is float32 here, without a warning; ids may have 64 bits."""
  layer = registry.MIXERS[name](64, rngs=nnx.Rngs(0))
  x = np.random.default_rng(0).normal(size=(1, 3, 64))
  ids = np.array([[1, 1, 2]])
  state = layer.init_state(1)
  y, _ = layer(x, state, segment_ids=ids)
  stats = layer.with_stats(x, state, segment_ids=ids)
  y_t, _ = layer.step(x[:, 0], state)
  assert {a.dtype.name for a in (y, stats[0], y_t)} == {"float32"}
  same, _ = layer(jnp.asarray(x), state, segment_ids=ids)
  np.testing.assert_array_equal(y, same)
