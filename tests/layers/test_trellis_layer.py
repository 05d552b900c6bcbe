"""Trellis as a layer: what keeps its exact recurrence trainable."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcomp import config as config_lib
from memcomp.layers import bounded_rate, trellis
from memcomp.models import abstract, decoder
from memcomp_kernels import trellis as trellis_op
from memcomp_kernels.math import activations

CONFIG = trellis.TrellisConfig(
  heads=2, key_dim=8, value_dim=12, num_slots=4, chunk_size=4
)


def build(config):
  return trellis.Trellis.from_config(config, 16, std=0.3, rngs=nnx.Rngs(0))


def tokens():
  return jax.random.normal(jax.random.key(1), (2, 8, 16))


def run(layer):
  """Outputs of a layer on random tokens."""
  return layer(tokens(), layer.init_state(2))[0]


def loss_and_gradient(config):
  @jax.jit
  def both():
    layer = build(config)
    return nnx.value_and_grad(lambda layer: jnp.sum(run(layer) ** 2))(layer)

  return both()


def change(**changes):
  return dataclasses.replace(CONFIG, **changes)


@pytest.fixture(scope="module")
def base():
  return loss_and_gradient(CONFIG)


@pytest.mark.slow
def test_learned_eps_starts_at_the_fixed_one_and_is_learned(base):
  value, gradient = loss_and_gradient(change(learn_phi_eps=True))
  np.testing.assert_allclose(value, base[0], rtol=1e-5)
  found = gradient["log_phi_eps"][...]
  assert found.shape == (2,)
  assert np.abs(found).min() > 1e-4
  assert found[0] != found[1]


def test_learned_eps_is_not_decayed():
  model = decoder.DecoderConfig(
    vocab_size=8,
    d_model=16,
    num_layers=1,
    mlp_dim=16,
    mixers={"memory": change(learn_phi_eps=True)},
  )
  found = abstract.model_of(model)
  flags = {
    path: flag
    for path, flag in nnx.to_flat_state(found.masks.decayed)
    if "log_phi_eps" in path
  }
  assert list(flags.values()) == [False]


@pytest.mark.slow
def test_one_token_at_a_time_has_the_switches_too():
  layer = build(change(learn_phi_eps=True, phi_eps=0.3, rate_bound=0.5))
  expected = jax.jit(run)(layer)
  step = jax.jit(lambda layer, x, state: layer.step(x, state))
  state = layer.init_state(2)
  for t in range(5):
    y, state = step(layer, tokens()[:, t], state)
    np.testing.assert_allclose(y, expected[:, t], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("phi", ["ln_silu", "l2_silu", "identity"])
def test_rate_bound_holds_in_each_pass(phi, passes):
  spec = trellis_op.Spec(num_slots=4, phi=phi)
  keys = iter(jax.random.split(jax.random.key(0), 7))

  def normal(dim):
    return jax.random.normal(next(keys), (2, 8, 3, dim))

  free = trellis_op.Inputs(
    query=normal(5),
    key=normal(5),
    value=3 * normal(7),
    target=normal(4),
    log_decay=normal(passes),
    write_rate=jax.nn.sigmoid(normal(passes)),
    log_phi_eps=normal(1),
  )
  bound = 0.5
  inputs = bounded_rate.bound(free, spec, bound)
  assert inputs.write_rate.shape == (2, 8, 3, 2)
  slope = activations.steepness(phi, jnp.exp(free.log_phi_eps[..., 0]))
  for gate, written in ((0, inputs.key), (-1, inputs.value)):
    square = jnp.sum(written**2, axis=-1) * slope**2
    before = free.write_rate[..., gate] * square
    after = inputs.write_rate[..., gate] * square
    assert before.max() > bound  # or nothing is tested
    assert after.max() < bound
    np.testing.assert_allclose(1 / after, 1 / before + 1 / bound, rtol=1e-4)
  for name in ("query", "key", "value", "target", "log_decay"):
    assert getattr(inputs, name) is getattr(free, name)


@pytest.mark.slow
def test_rate_bound_of_the_layer(base):
  def loss(bound):
    return jax.jit(lambda: jnp.sum(run(build(change(rate_bound=bound))) ** 2))()

  np.testing.assert_allclose(loss(1e9), base[0], rtol=1e-5)
  assert abs(loss(1e-3) - base[0]) > 1e-3 * base[0]


@pytest.mark.slow
def test_a_bounded_write_contracts_where_an_unbounded_one_does_not():
  """One key again and again: its answer goes to the target, or runs away."""
  spec = trellis_op.Spec(
    num_slots=4, phi="l2", phi_eps=0.01, gradient_at="token"
  )
  time = 60
  code = jnp.array([0.05, -0.02, 0.03, 0.01])
  target = activations.activate("l2", code, spec.phi_eps)
  one = jnp.ones((1, time, 1, 1))
  inputs = trellis_op.Inputs(
    query=one,
    key=one,
    value=one,
    target=jnp.broadcast_to(target, (1, time, 1, 4)),
    log_decay=0 * one,
    write_rate=0.2 * one,  # 0.2 / 0.01 is far above 2
  )
  state = trellis_op.init_state(
    spec,
    batch=1,
    heads=1,
    key_dim=1,
    value_dim=1,
    key_memory=1.2 * code[None, :, None],
    value_memory=1.2 * code[None, :, None],
  )

  def misses(inputs):
    final, _ = trellis_op.reference(state, inputs, spec=spec)
    return [
      float(jnp.abs(memory[0, 0, :, 0] - code).max())
      for memory in (final.key_memory, final.value_memory)
    ]

  assert min(misses(inputs)) > 0.02
  assert max(misses(bounded_rate.bound(inputs, spec, 1.0))) < 1e-4


@pytest.mark.parametrize(
  "changes",
  [{"rate_bound": -1.0}, {"learn_phi_eps": True, "phi": "silu"}],
  ids=str,
)
def test_mistakes_are_named(changes):
  with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
    change(**changes).validate()


def test_switches_are_fields_of_the_config():
  resolved = config_lib.to_dict(change(rate_bound=2.0, learn_phi_eps=True))
  assert resolved["rate_bound"] == 2.0
  assert resolved["learn_phi_eps"] is True
