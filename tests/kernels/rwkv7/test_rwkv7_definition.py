"""Level 1: the reference is the paper's RWKV-7."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import delta_rule, rwkv7
from memcomp_kernels.testing import memories

COMPILED = programs.of(rwkv7)
MEMORY = memories.MEMORIES["rwkv7"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 4}


pytestmark = pytest.mark.usefixtures("float64")


def test_by_hand():
  """Two features, values of one.

  Token 1 writes 4 by (1, 1): S = (4, 4); r = (1, 0): p = 4.
  Token 2: kappa^ = (3/5, 4/5) finds 28/5; S decays to (2, 1); removed are
    (1 * 3/5, 1/2 * 4/5) 28/5 = (84/25, 56/25); written is 10 by (0, 1):
    S = (2 - 84/25, 1 - 56/25 + 10) = (-34/25, 219/25); r = (1, 1): p = 37/5.
  """
  spec = rwkv7.Spec()
  state = rwkv7.init_state(
    spec, batch=1, heads=1, key_dim=2, value_dim=1, dtype=jnp.float64
  )
  inputs = rwkv7.Inputs(
    query=by_hand.one_head([1, 0], [1, 1]),
    key=by_hand.one_head([1, 1], [0, 1]),
    value=by_hand.one_head([4.0], [10.0]),
    removal_key=by_hand.one_head([1, 0], [0.6, 0.8]),
    log_decay=jnp.log(by_hand.one_head([1, 1], [0.5, 0.25])),
    write_rate=by_hand.one_head([1, 1], [1, 0.5]),
  )
  state, p = COMPILED.reference(state, inputs, spec=spec)
  np.testing.assert_allclose(state.memory[0, 0, :, 0], [-34 / 25, 219 / 25])
  np.testing.assert_allclose(p[0, :, 0, 0], [4, 37 / 5])


def arguments(time=12):
  spec = rwkv7.Spec()
  inputs = MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)
  return MEMORY.make_state(jax.random.key(1), spec, **SIZES), inputs


def test_equation_17_as_it_is_printed():
  """With the transition as a matrix, wkv `value x key`."""
  state, inputs = arguments(6)
  wkv = jnp.swapaxes(state.memory, -1, -2)
  final, p = COMPILED.reference(state, inputs, spec=rwkv7.Spec())
  for t in range(6):
    r, k, v, kappa, log_w, a = (x[:, t] for x in inputs)
    transition = jnp.exp(log_w)[..., None] * jnp.eye(5)
    transition = transition - kappa[..., :, None] * (a * kappa)[..., None, :]
    wkv = wkv @ transition + v[..., :, None] * k[..., None, :]
    expected = jnp.einsum("bhvk,bhk->bhv", wkv, r)
    np.testing.assert_allclose(p[:, t], expected, rtol=1e-10)
  np.testing.assert_allclose(
    final.memory, jnp.swapaxes(wkv, -1, -2), rtol=1e-10
  )


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_without_decay_it_can_be_the_delta_rule(function):
  """A removal key that is written by, at one rate for all channels."""
  state, inputs = arguments()
  rate = inputs.write_rate[..., :1]
  same = inputs._replace(
    key=rate * inputs.removal_key,
    log_decay=0 * inputs.log_decay,
    write_rate=jnp.broadcast_to(rate, inputs.write_rate.shape),
  )
  _, p = function(state, same, spec=rwkv7.Spec())
  _, o = programs.of(delta_rule).reference(
    delta_rule.State(state.memory, state.segment_id),
    delta_rule.Inputs(
      query=inputs.query,
      key=inputs.removal_key,
      value=inputs.value,
      log_decay=0 * rate,
      write_rate=rate,
    ),
    spec=delta_rule.Spec(forget_gate=False, scale=1.0),
  )
  np.testing.assert_allclose(p, o, rtol=1e-9, atol=1e-12)


def test_channels_decay_apart():
  """Without removal each channel is a linear attention of its own."""
  state, inputs = arguments()
  inputs = inputs._replace(write_rate=0 * inputs.write_rate)
  final, _ = COMPILED.chunk(state, inputs, spec=rwkv7.Spec())
  S = state.memory
  for t in range(12):
    S = jnp.exp(inputs.log_decay[:, t])[..., None] * S
    S = S + inputs.key[:, t, ..., None] * inputs.value[:, t, :, None]
  np.testing.assert_allclose(final.memory, S, rtol=1e-10)


def test_scale_is_of_the_read():
  state, inputs = arguments()
  _, p = COMPILED.chunk(state, inputs, spec=rwkv7.Spec())
  _, scaled = COMPILED.chunk(state, inputs, spec=rwkv7.Spec(scale=None))
  np.testing.assert_allclose(scaled, 5**-0.5 * p, rtol=1e-12)


def test_spec_names_the_field_out_of_range():
  with pytest.raises(ValueError, match="scale="):
    rwkv7.Spec(scale=0.0)


def test_chunk_names_what_does_not_fit():
  state, inputs = arguments()
  spec = rwkv7.Spec()
  for name in ("key", "removal_key", "log_decay", "write_rate"):
    with pytest.raises(ValueError, match=rf"{name} has shape .* expected"):
      rwkv7.chunk(state, inputs._replace(**{name: inputs.value}), spec=spec)
  with pytest.raises(NotImplementedError, match="no mosaic_gpu"):
    rwkv7.chunk(state, inputs, spec=spec, implementation="mosaic_gpu")
  with pytest.raises(ValueError, match="at least float32"):
    rwkv7.init_state(spec, **SIZES, dtype=jnp.bfloat16)
