import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memcomp import config as config_lib
from memcomp.models import abstract, comparison
from memcomp.training import optimizer

Masks = abstract.Masks


def _config(**fields):
  return config_lib.OptimizerConfig(
    **{"learning_rate": 1.0, "final_learning_rate": 0.1, "warmup_steps": 4}
    | fields
  )


@pytest.mark.parametrize("schedule", optimizer.SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 4])
def test_schedule_rises_to_the_peak_and_ends_at_the_final_rate(
  schedule, warmup
):
  config = _config(schedule=schedule, warmup_steps=warmup)
  rate = jax.jit(optimizer.make_schedule(config, 20))
  values = np.array([float(rate(step)) for step in range(20)])
  assert values[0] > 0
  assert (np.diff(values[: warmup + 1]) > 0).all()
  np.testing.assert_allclose(values[warmup], 1.0, rtol=1e-6)
  assert (np.diff(values[warmup:]) <= 1e-7).all()
  np.testing.assert_allclose(values[-1], 0.1, rtol=1e-5)


def test_shapes_of_the_schedules():
  def middle(schedule, step, **fields):
    rate = optimizer.make_schedule(
      _config(schedule=schedule, warmup_steps=0, **fields), 101
    )
    return float(rate(step))

  np.testing.assert_allclose(middle("linear", 25), 0.775, rtol=1e-5)
  cosine = 0.1 + 0.9 * (0.5 + 0.5 * np.cos(np.pi / 4))
  np.testing.assert_allclose(middle("cosine", 25), cosine, rtol=1e-5)
  assert middle("constant_then_decay", 79, decay_share=0.2) == 1.0
  late = middle("constant_then_decay", 91, decay_share=0.2)
  assert 0.1 < late < 0.6


def test_the_shortest_decay_ends_at_the_final_rate():
  rate = optimizer.make_schedule(
    _config(schedule="constant_then_decay", decay_share=0.005), 100
  )
  assert float(rate(98)) == 1.0
  np.testing.assert_allclose(float(rate(99)), 0.1, rtol=1e-5)


@pytest.mark.parametrize("schedule", optimizer.SCHEDULES)
def test_one_step_is_a_schedule_too(schedule):
  rate = optimizer.make_schedule(
    _config(schedule=schedule, warmup_steps=0, decay_share=1.0), 1
  )
  assert np.isfinite(float(rate(0)))


def test_weight_decay_is_on_marked_parameters_only():
  params = {"matrix": jnp.ones((2, 2)), "bias": jnp.ones(2)}
  config = _config(warmup_steps=0, weight_decay=0.1)
  tx = optimizer.make(config, 10, Masks({"matrix": True, "bias": False}))
  zero = {"matrix": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
  updates, _ = tx.update(zero, tx.init(params), params)
  np.testing.assert_allclose(updates["matrix"], -0.1, rtol=1e-6)
  assert (np.asarray(updates["bias"]) == 0).all()


@pytest.mark.parametrize(("clip_norm", "scale"), [(1.0, 0.2), (0.0, 1.0)])
def test_clipping_by_the_global_norm(clip_norm, scale):
  params = {"w": jnp.zeros(2)}
  config = _config(clip_norm=clip_norm, b1=0.0, weight_decay=0.0)
  tx = optimizer.make(config, 10, Masks({"w": True}))
  grads = {"w": jnp.array([3.0, 4.0])}
  _, state = tx.update(grads, tx.init(params), params)
  adam = optax.tree_utils.tree_get(state, "mu")
  np.testing.assert_allclose(adam["w"], scale * grads["w"], rtol=1e-6)


def test_adam_takes_its_coefficients():
  params = {"w": jnp.zeros(1)}
  config = _config(
    b1=0.5, b2=0.25, eps=1.0, clip_norm=0, weight_decay=0, warmup_steps=0
  )
  tx = optimizer.make(config, 10, Masks({"w": False}))
  state = tx.init(params)
  updates, state = tx.update({"w": jnp.array([2.0])}, state, params)
  # Bias-corrected moments of the first step are g and g**2.
  np.testing.assert_allclose(updates["w"], -2.0 / (2.0 + 1.0), rtol=1e-6)
  nu = optax.tree_utils.tree_get(state, "nu")["w"]
  np.testing.assert_allclose(nu, 0.75 * 4.0, rtol=1e-6)


def test_corrected_decay_follows_the_rate_twice():
  config = _config(
    warmup_steps=0, schedule="linear", weight_decay=0.5, corrected_decay=True
  )
  params = {"w": jnp.ones(1)}
  tx = optimizer.make(config, 10, Masks({"w": True}))
  state, rate = tx.init(params), jax.jit(optimizer.make_schedule(config, 10))
  update_of = jax.jit(tx.update)
  for step in range(10):
    updates, state = update_of({"w": jnp.zeros(1)}, state, params)
    expected = -0.5 * float(rate(step)) ** 2  # the peak is 1
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)


def test_rates_follow_the_width():
  config = _config(warmup_steps=0, weight_decay=0.5, base_width=64, clip_norm=0)
  params = {"w": jnp.ones(1), "table": jnp.ones(1)}
  hidden = {"w": True, "table": False}
  tx = optimizer.make(
    config, 10, Masks({"w": True, "table": True}, hidden), 256
  )
  gradient = {"w": jnp.ones(1), "table": jnp.ones(1)}
  updates, _ = tx.update(gradient, tx.init(params), params)
  # Adam's first update is 1; four times the width, a quarter of the rate, and
  # a decay whose product with the rate is as before.
  np.testing.assert_allclose(updates["w"], -(0.25 + 0.5), rtol=1e-5)
  np.testing.assert_allclose(updates["table"], -(1 + 0.5), rtol=1e-5)


def _orthogonalized(matrix):
  """Five steps of Muon's Newton-Schulz iteration, in float64."""
  wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
  x = wide / np.linalg.norm(wide)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x if wide is matrix else x.T


@pytest.mark.parametrize("shape", [(6, 4), (3, 8)])
def test_muon_is_its_formula_and_leaves_the_rest_to_adam(shape):
  config = _config(
    name="muon",
    momentum=0.8,
    clip_norm=0,
    warmup_steps=0,
    weight_decay=0.5,
    schedule="linear",
  )
  rng = np.random.default_rng(0)
  params = {"stack": rng.normal(size=(2, *shape)), "table": np.ones(shape)}
  grads = [
    {"stack": rng.normal(size=(2, *shape)), "table": np.ones(shape)}
    for _ in range(3)
  ]
  decayed = {"stack": True, "table": False}
  tx = optimizer.make(config, 10, Masks(decayed, in_layers=decayed))
  state, rate = tx.init(params), jax.jit(optimizer.make_schedule(config, 10))
  update_of = jax.jit(tx.update)
  momentum, weight = np.zeros((2, *shape)), params["stack"]
  for step, gradient in enumerate(grads):
    g, b = gradient["stack"], config.momentum
    momentum = b * momentum + (1 - b) * g
    # Nesterov's look ahead, with both terms corrected for their start.
    ahead = b * momentum / (1 - b ** (step + 2))
    ahead += (1 - b) * g / (1 - b ** (step + 1))
    update = np.stack([_orthogonalized(x) for x in ahead])
    update *= 0.2 * max(shape) ** 0.5
    expected = -float(rate(step)) * (update + 0.5 * weight)
    found, state = update_of(gradient, state, params)
    np.testing.assert_allclose(found["stack"], expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["table"], -float(rate(step)), rtol=1e-5)
  # As large as Adam's updates of the same rate.
  assert 0.15 < np.sqrt(np.mean(update**2)) < 0.25


def _taken(name, **options):
  """Last names of the parameters that Muon updates in a model, by layer."""
  config = comparison.language_model(name)
  mixers = {
    name: dataclasses.replace(mixer, **options)
    for name, mixer in config.mixers.items()
  }
  config = dataclasses.replace(config, tied_embeddings=False, mixers=mixers)
  flat = nnx.to_flat_state(abstract.model_of(config).masks.in_layers)
  return {path[2:] for path, chosen in flat if chosen}


def test_muon_updates_matrices_of_layers():
  mixer = "query_key", "target", "value", "gate", "log_decay", "write_rate"
  assert _taken("trellis") == {
    *(("mixer", name, "kernel") for name in (*mixer, "out")),
    *(("mlp", name, "kernel") for name in ("up", "gate", "down")),
  }


@pytest.mark.parametrize("name", comparison.NAMES)
def test_muon_updates_nothing_but_kernels(name):
  # The gates of two-pass delta are kernels, one for each pass.
  assert {path[-1] for path in _taken(name)} <= {"kernel", "gates"}


def test_muon_spreads_the_keys_of_slots():
  taken = _taken("tensor_cache", num_slots=4) - _taken("tensor_cache")
  assert taken == {("mixer", "slot_keys")}
