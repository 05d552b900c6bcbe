"""Lattice as a layer: every knob is one override, mistakes are named."""

import dataclasses

import jax
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import lattice, options

CONFIG = lattice.LatticeConfig(heads=2, value_dim=8, num_slots=4, chunk_size=4)


def build(config):
  return lattice.Lattice.from_config(config, 16, std=0.3, rngs=nnx.Rngs(0))


def run(config):
  """Outputs of a layer on 30 random tokens."""

  @jax.jit
  def outputs():
    layer = build(config)
    x = jax.random.normal(jax.random.key(1), (2, 30, 16))
    return layer(x, layer.init_state(2))[0]

  return np.asarray(outputs())


@pytest.fixture(scope="module")
def base():
  return run(CONFIG)


@pytest.mark.parametrize(
  ("value_dim", "given", "slots"),
  [(32, 0, 32), (64, 0, 64), (128, 0, 64), (32, 8, 8), (128, 96, 96)],
)
def test_slots_follow_the_values(value_dim, given, slots):
  config = lattice.LatticeConfig(num_slots=given, value_dim=value_dim)
  assert config.at_width(2 * value_dim).spec().num_slots == slots


def test_the_width_of_keys_is_no_size():
  """Keys are codes over the slots, so 100 features need not divide."""
  layer = lattice.Lattice(100, heads=3, value_dim=16, rngs=nnx.Rngs(0))
  assert layer.spec.num_slots == 16


@pytest.mark.slow
def test_in_float64_sweeps_solve_to_its_rounding():
  x = jax.random.normal(jax.random.key(0), (2, 21, 32))

  def outputs(method):
    layer = lattice.Lattice(
      32,
      heads=2,
      gradient_at="token",
      solver=options.SolverConfig(method=method),
      rngs=nnx.Rngs(0),
    )
    parameters = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda p: p.astype("float64"), parameters))
    return nnx.jit(lambda layer, x: layer(x))(layer, x.astype("float64"))

  with jax.enable_x64(True):
    sweeps, expected = map(outputs, ("sweeps", "substitution"))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(sweeps, expected, atol=1e-12 * scale)


KNOBS = [
  # The paper's ablation, from the lowest rung; the forget gate is the last.
  {"update": "delta"},
  {"update": "orthogonal"},
  {"forget_gate": False},
  {"objective": "encoding"},
  {"objective": "similarity"},
  {"sparsity": 0.1},
  {"gradient_at": "token"},
  {"chunk_size": 8},
  {"num_slots": 8},
  {"normalize": "none"},
  {"normalize": "qkv"},
  {"post_norm": True},
  {"convolution_width": 0},
  {"convolve_value": True},
]


# The others take the same way into the layer as one of these.
ALWAYS = [{"objective": "encoding"}]


@pytest.mark.slow
@pytest.mark.parametrize("change", rotation.cases(KNOBS, ALWAYS), ids=str)
def test_every_knob_is_one_override(change, base):
  y = run(dataclasses.replace(CONFIG, **change))
  assert np.isfinite(y).all()
  assert np.abs(y - base).max() > 1e-3


def test_initial_slots_are_learned_or_fixed():
  learned = build(CONFIG)
  fixed = build(dataclasses.replace(CONFIG, memory_init="fixed"))
  assert learned.initial_memory is not None
  assert fixed.initial_memory is None
  for layer in (learned, fixed):
    slots = layer.init_state(1).memory.memory[0, 0]
    np.testing.assert_allclose(slots.T @ slots, np.eye(4), atol=1e-5)


@pytest.mark.parametrize(
  "change",
  [
    {"num_slots": 9},
    {"update": "sphere"},
    {"objective": "coding"},
    {"sparsity": -1.0},
    {"normalize": "all"},
    {"memory_init": "random"},
    {"write_rate_init": 2.0},
    {"decay_init": 0.0},
    {"convolution_width": 1},
    {"heads": -1},
  ],
  ids=str,
)
def test_mistakes_are_named(change):
  with pytest.raises(ValueError, match=f"{next(iter(change))}="):
    build(dataclasses.replace(CONFIG, **change))


def test_state_agrees_with_the_figure():
  assert build(CONFIG).init_state(1).memory.memory.size == 2 * 4 * 8
  assert CONFIG.state_floats(99) == 2 * 4 * 8
