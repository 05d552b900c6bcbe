"""Tensor Cache as a layer: knobs, routes, sizes, mistakes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import tensor_cache

BASE = tensor_cache.TensorCacheConfig(
  heads=2,
  key_dim=8,
  value_dim=8,
  rotary_dim=4,
  window_size=6,
  chunk_size=4,
  num_slots=3,
  top_k_slots=2,
  timescales=2,
  write_rate_init=0.5,
  slow_write_rate_init=0.5,
)
EVICTED = dataclasses.replace(BASE, write_population="evicted")
SINGLE = dataclasses.replace(BASE, num_slots=1, top_k_slots=1)


def build(config, seed=0):
  return tensor_cache.TensorCache.from_config(
    config, 16, std=0.5, rngs=nnx.Rngs(seed)
  )


@functools.cache
def program(fields):
  config = tensor_cache.TensorCacheConfig(**dict(fields))

  @jax.jit
  def outputs(noise):
    graph, params = nnx.split(build(config))
    layer = nnx.merge(graph, jax.tree.map(lambda x: x + 0.1, params))
    x = jax.random.normal(jax.random.key(1), (2, 24, 16))
    return layer(x, layer.init_state(2), noise=noise, max_position=0)[0]

  return outputs


def run(config, noise=None):
  """Outputs of a layer on 24 random tokens; its learned numbers are moved."""
  fields = tuple(dataclasses.asdict(config).items())
  return np.asarray(program(fields)(noise))


CONFIGS = {"all": BASE, "evicted": EVICTED, "single": SINGLE}

KNOBS = [
  ("all", {"window_size": 5}),
  ("all", {"sink_tokens": 1}),
  ("all", {"rule": "delta"}),
  ("all", {"rule": "wedge"}),
  ("all", {"write_population": "evicted"}),
  ("all", {"chunk_size": 3}),
  ("all", {"num_slots": 2}),
  ("all", {"timescales": 1}),
  ("all", {"unit_keys": False}),
  ("all", {"unit_queries": False}),
  ("all", {"value_scale": 0.5}),
  ("all", {"decay_init": 0.9}),
  ("all", {"write_rate_init": 0.1}),
  ("all", {"slow_decay_init": 0.9}),
  ("all", {"slow_write_rate_init": 0.1}),
  ("all", {"read_gate_init": 0.0}),
  ("all", {"read_gate_speed": 8.0}),
  ("all", {"token_gate": True}),
  ("all", {"memory_output": True}),
  ("all", {"top_k_slots": 1}),
  ("all", {"temperature": 0.1}),
  ("evicted", {"route_by": "query"}),
  ("evicted", {"read_after_write": True}),
  ("single", {"chunk_mean": True}),
  ("single", {"read_norm": True}),
]


# The others take the same way into the layer as one of these.
ALWAYS = [("single", {"read_norm": True})]


@pytest.mark.parametrize(
  ("name", "change"), rotation.cases(KNOBS, ALWAYS), ids=str
)
def test_every_knob_is_one_override(name, change):
  y = run(dataclasses.replace(CONFIGS[name], **change))
  assert np.isfinite(y).all()
  assert np.abs(y - run(CONFIGS[name])).max() > 1e-4


def test_a_closed_gate_leaves_local_attention():
  from memcomp.layers import softmax_attention

  y = run(dataclasses.replace(SINGLE, read_gate_init=-1e9))
  config = softmax_attention.SoftmaxAttentionConfig(
    heads=2, key_dim=8, value_dim=8, rotary_dim=4, window_size=6
  )
  layer = build(SINGLE)
  local = softmax_attention.SoftmaxAttention.from_config(
    config, 16, std=0.5, rngs=nnx.Rngs(0)
  )
  shared = {"projection": layer.projection, "out": layer.out}
  for name, module in shared.items():
    moved = jax.tree.map(lambda x: x + 0.1, nnx.state(module))
    nnx.update(getattr(local, name), moved)
  x = jax.random.normal(jax.random.key(1), (2, 24, 16))
  call = jax.jit(lambda x: local(x, local.init_state(2), max_position=0)[0])
  np.testing.assert_allclose(y, call(x), atol=1e-5)


def test_the_memory_is_read_through_the_windows_output_projection():
  """As if the paper's W_tc were W_o."""
  layer = build(SINGLE)
  own = build(dataclasses.replace(SINGLE, memory_output=True))
  for name in ("projection", "out", "log_decay", "write_rate", "read_gate"):
    setattr(own, name, getattr(layer, name))
  own.memory_out = layer.out
  x = jax.random.normal(jax.random.key(1), (2, 24, 16))

  @jax.jit
  def outputs(x):
    return [y(x, y.init_state(2), max_position=0)[0] for y in (layer, own)]

  shared, apart = outputs(x)
  np.testing.assert_allclose(shared, apart, atol=1e-5)


def test_what_the_memory_starts_as():
  layer = build(BASE)
  decay = jax.nn.sigmoid(layer.log_decay[...])
  np.testing.assert_allclose(decay, [[0.995, 0.9995]] * 2, rtol=1e-6)
  rate = jax.nn.sigmoid(
    build(
      dataclasses.replace(BASE, write_rate_init=0.05, slow_write_rate_init=0.01)
    ).write_rate[...]
  )
  np.testing.assert_allclose(rate, [[0.05, 0.01]] * 2, rtol=1e-5)
  np.testing.assert_allclose(jax.nn.sigmoid(layer.read_gate[...]), 0.1192, 1e-3)
  np.testing.assert_allclose(jax.nn.sigmoid(layer.read_mix[...]), 0.5)


def test_a_fast_gate_starts_alike_and_moves_further():
  fast = build(dataclasses.replace(SINGLE, read_gate_speed=8.0))
  slow = build(SINGLE)
  x = jax.random.normal(jax.random.key(1), (2, 24, 16))
  call = jax.jit(lambda layer: layer(x, layer.init_state(2), max_position=0)[0])
  start = call(slow)
  np.testing.assert_allclose(call(fast), start, atol=1e-6)
  fast.read_gate[...] += 0.1
  slow.read_gate[...] += 0.8
  np.testing.assert_allclose(call(fast), call(slow), atol=1e-6)
  assert np.abs(call(fast) - start).max() > 1e-3


def test_routes_by_hand():
  logits = jnp.log(jnp.array([1.0, 4.0, 2.0, 2.0]))
  np.testing.assert_allclose(
    tensor_cache._top_k(logits, 2), [0, 4 / 6, 2 / 6, 0], rtol=1e-6
  )
  write = tensor_cache._straight_through(logits, 1.0, None)
  np.testing.assert_array_equal(write, [0, 1, 0, 0])


def test_a_write_route_has_the_gradient_of_its_softmax():
  logits, weights = jnp.array([0.3, -0.2, 0.1]), jnp.array([1.0, 2.0, 4.0])
  got, expected = (
    jax.grad(lambda x: function(x) @ weights)(logits)  # noqa: B023
    for function in (
      lambda x: tensor_cache._straight_through(x, 0.5, None),
      lambda x: jax.nn.softmax(x / 0.5),
    )
  )
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_noise_moves_writes_and_only_in_training():
  logits = jnp.zeros((4000, 3))
  routes = tensor_cache._straight_through(logits, 1.0, jax.random.key(0))
  np.testing.assert_allclose(routes.mean(0), 1 / 3, atol=0.03)
  first, second = (run(BASE, jax.random.key(i)) for i in range(2))
  assert np.abs(first - second).max() > 1e-4


@pytest.mark.parametrize(
  "change",
  [
    {"rule": "hebb"},
    {"window_size": 0},
    {"sink_tokens": 6},
    {"rotary_dim": 3},
    {"heads": -1},
    {"decay_init": 1.0},
    {"slow_write_rate_init": 0.0},
    {"top_k_slots": 4},
    {"top_k_slots": 0},
    {"temperature": 0.0},
    {"chunk_mean": True},
  ],
  ids=str,
)
def test_mistakes_are_named(change):
  with pytest.raises(ValueError, match=f"{next(iter(change))}="):
    dataclasses.replace(BASE, **change).validate()


def test_a_wedge_must_be_square():
  with pytest.raises(ValueError, match=r'rule="wedge" needs key_dim=8 and'):
    dataclasses.replace(BASE, rule="wedge", value_dim=4).validate()


def test_sizes_by_hand():
  # The paper's synthetic task: 12 tokens of 4 heads of 32, 28 KiB a layer.
  config = tensor_cache.TensorCacheConfig(
    heads=4,
    key_dim=32,
    value_dim=32,
    rotary_dim=32,
    window_size=12,
    write_population="evicted",
  )
  assert 4 * 4 * config.state_floats(100) == 112 * 1024
  assert config.state_floats(3) == 4 * (3 * 64 + 32 * 32)
  slots = dataclasses.replace(config, num_slots=2, timescales=2, read_norm=True)
  assert slots.state_floats(100) == 4 * (12 * 66 + 4 * 32 * 33)
  # 1 + 2 + ... + 10 scores of 32 and sums of 32; a read and a write of 32 x 32.
  local = 2 * 64 * 55 // 10
  assert config.memory_flops(10) == 4 * (local + 2 * 2 * 1024)
  assert slots.memory_flops(10) == 4 * (local + 4 * 2 * 2 * 1024)
