"""Level 1: the reference is the two-pass system as it is described."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import two_pass_delta
from memcomp_kernels.testing import memories
from memcomp_kernels.two_pass_delta import reference as definition

COMPILED = programs.of(two_pass_delta)
MEMORY = memories.MEMORIES["two_pass_delta"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 4}


pytestmark = pytest.mark.usefixtures("float64")


def two_tokens(**fields):
  """Sources of two features, keys and values of one; codes are +-1."""
  spec = two_pass_delta.Spec(code_eps=1e-30, **fields)
  state = two_pass_delta.init_state(
    spec,
    batch=1,
    heads=1,
    key_dim=1,
    value_dim=1,
    source_dim=2,
    dtype=jnp.float64,
  )
  inputs = two_pass_delta.Inputs(
    query=by_hand.one_head([1, 0], [1, 0]),
    source=by_hand.one_head([1, 0], [1, 1]),
    key=by_hand.one_head([2.0], [-3.0]),
    value=by_hand.one_head([4.0], [6.0]),
    log_decay=jnp.log(by_hand.one_head([1.0], [0.5])),
    write_rate=by_hand.one_head([0.5], [0.25]),
  )
  return spec, state, inputs


def test_by_hand():
  """A code of one number is its sign.

  Token 1: e_K = 0 - 2, S_K = 0.5 * 2 (1, 0) = (1, 0); c = sign 1 = 1;
    e_V = -4, S_V = 2. Read (1, 0): code 1, y = 2.
  Token 2, decay 1/2: S_K . x = 1, e_K = 4; S_K = (1/2, 0) - 1/4 * 4 (1, 1) =
    (-1/2, -1); c = sign(-3/2) = -1; e_V = -2 - 6 = -8; S_V = 1 + 1/4 * 8 * -1 =
    -1. Read (1, 0): code -1, y = 1.
  """
  spec, state, inputs = two_tokens()
  state, y = COMPILED.reference(state, inputs, spec=spec)
  np.testing.assert_allclose(state.key_memory[0, 0, :, 0], [-0.5, -1])
  np.testing.assert_allclose(state.value_memory[0, 0], [[-1]])
  np.testing.assert_allclose(y[0, :, 0, 0], [2, 1])


def test_read_first_by_hand():
  """The same states; token 1 reads nothing, token 2 what token 1 left."""
  spec, state, inputs = two_tokens(read_first=True)
  state, y = COMPILED.reference(state, inputs, spec=spec)
  np.testing.assert_allclose(state.value_memory[0, 0], [[-1]])
  np.testing.assert_allclose(y[0, :, 0, 0], [0, 2])


def test_weight_decay_by_hand():
  """Token 2's decays 1/2 - 1/4 lambda: 1/4 for keys, not below 0 for values.

  S_K = (1/4, 0) - (1, 1) = (-3/4, -1), S_V = 0 + 1/4 * 8 * -1 = -2.
  """
  spec, state, inputs = two_tokens(key_weight_decay=1.0, value_weight_decay=9.0)
  state, _ = COMPILED.reference(state, inputs, spec=spec)
  np.testing.assert_allclose(state.key_memory[0, 0, :, 0], [-0.75, -1])
  np.testing.assert_allclose(state.value_memory[0, 0], [[-2]])


def test_code_is_silu_of_length_root_n():
  z = jax.random.normal(jax.random.key(0), (3, 8))
  code = definition.nsilu(z, 1e-30)
  np.testing.assert_allclose(jnp.linalg.norm(code, axis=-1), 8**0.5)
  ratio = code / (z * jax.nn.sigmoid(z))
  np.testing.assert_allclose(ratio, ratio[:, :1] * jnp.ones(8), rtol=1e-12)


def test_each_pass_is_a_gradient_step():
  """Of |S^T x - k|^2 / 2 + lambda |S|^2 / 2, both, by autodiff."""
  spec = two_pass_delta.Spec(key_weight_decay=0.3, value_weight_decay=0.2)
  state, inputs = arguments(spec, 1)
  first = jax.tree.map(lambda x: x[:, 0], inputs)
  theta = first.write_rate[..., None]
  alpha = 1 - jnp.exp(first.log_decay)[..., None]

  def loss(S, x, target, weight_decay):
    error = definition.answer(S, x) - target
    return jnp.sum(error**2) / 2 + weight_decay * jnp.sum(S**2) / 2

  def descend(S, *rest):
    return S - alpha * S - theta * jax.grad(loss)(S, *rest)

  S_K = descend(state.key_memory, first.source, first.key, 0.3)
  c = definition.nsilu(definition.answer(S_K, first.source), spec.code_eps)
  S_V = descend(state.value_memory, c, first.value, 0.2)
  after, _ = COMPILED.step(state, first, spec=spec)
  np.testing.assert_allclose(after.key_memory, S_K, rtol=1e-12)
  np.testing.assert_allclose(after.value_memory, S_V, rtol=1e-12)


def arguments(spec, time=12):
  inputs = MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)
  return MEMORY.make_state(jax.random.key(1), spec, **SIZES), inputs


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_tokens_that_are_not_active_only_read(function):
  spec = two_pass_delta.Spec(code_eps=0.1)
  state, inputs = arguments(spec)
  written = jnp.arange(12) % 3 == 0
  active = jnp.broadcast_to(
    written[None, :, None, None].astype(jnp.float64), (2, 12, 2, 1)
  )
  final, y = function(state, inputs._replace(active=active), spec=spec)
  some = jax.tree.map(lambda x: x[:, written], inputs)
  expected, y_some = COMPILED.reference(state, some, spec=spec)
  np.testing.assert_allclose(final.key_memory, expected.key_memory, rtol=1e-10)
  np.testing.assert_allclose(y[:, written], y_some, rtol=1e-9)
  # Token 1 reads, with its own query, what token 0 left.
  one, _ = COMPILED.step(
    state, jax.tree.map(lambda x: x[:, 0], inputs), spec=spec
  )
  code = definition.nsilu(
    definition.answer(one.key_memory, inputs.query[:, 1]), spec.code_eps
  )
  np.testing.assert_allclose(
    y[:, 1], definition.answer(one.value_memory, code), rtol=1e-9
  )


def test_rates_of_the_passes_are_apart():
  spec = two_pass_delta.Spec(code_eps=0.1)
  _, inputs = arguments(spec, 1)
  rate = inputs.write_rate
  both = jnp.concatenate([rate, 0 * rate], axis=-1)
  (_, first), (_, second) = definition.gates_of_passes(
    inputs._replace(write_rate=both), spec, rate.dtype
  )
  np.testing.assert_array_equal(first, rate)
  assert not jnp.any(second)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("key_weight_decay", -1.0),
    ("value_weight_decay", -1.0),
    ("code_eps", 0.0),
  ],
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    two_pass_delta.Spec(**{field: value})


def test_chunk_names_what_does_not_fit():
  spec = two_pass_delta.Spec()
  state, inputs = arguments(spec)
  with pytest.raises(ValueError, match=r"source has shape .* expected"):
    two_pass_delta.chunk(state, inputs._replace(source=inputs.key), spec=spec)
  with pytest.raises(ValueError, match=r"write_rate has shape .* expected"):
    two_pass_delta.chunk(
      state, inputs._replace(write_rate=inputs.key), spec=spec
    )
  with pytest.raises(ValueError, match=r"active has shape .* expected"):
    two_pass_delta.chunk(state, inputs._replace(active=inputs.key), spec=spec)
  with pytest.raises(NotImplementedError, match="no mosaic_gpu"):
    two_pass_delta.chunk(state, inputs, spec=spec, implementation="mosaic_gpu")
  with pytest.raises(ValueError, match="at least float32"):
    two_pass_delta.init_state(spec, **SIZES, dtype=jnp.bfloat16)
