"""Level 1: the reference is the paper's Trellis."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import trellis
from memcomp_kernels.math import activations
from memcomp_kernels.testing import errors, memories

COMPILED = programs.of(trellis)
MEMORY = memories.MEMORIES["trellis"]


pytestmark = pytest.mark.usefixtures("float64")


def test_two_tokens_by_hand():
  """phi = identity, f = identity, one slot: arithmetic on paper."""
  spec = trellis.Spec(
    num_slots=1, phi="identity", read_activation="identity", gradient_at="token"
  )
  state = trellis.init_state(
    spec, batch=1, heads=1, key_dim=2, value_dim=1, dtype=jnp.float64
  )
  inputs = trellis.Inputs(
    query=by_hand.one_head([1, 1], [0, 2]),
    key=by_hand.one_head([1, 0], [1, 1]),
    value=by_hand.one_head([2], [3]),
    target=by_hand.one_head([4], [1]),
    log_decay=jnp.log(by_hand.one_head([1.0], [0.5])),
    write_rate=by_hand.one_head([0.5], [0.25]),
  )
  state, y = COMPILED.reference(state, inputs, spec=spec)
  # Token 1: z = 0, u = 0 - 4; M_K = 0.5 * 4 * [1, 0] = [2, 0];
  #          M_V = 0.5 * 4 * 2 = 4; read M_K q = 2; y = 4 * 2 = 8.
  # Token 2: z_K = 2, u_K = 1; M_K = 0.5 [2, 0] - 0.25 [1, 1] = [.75, -.25];
  #          z_V = 12, u_V = 11; M_V = 2 - 0.25 * 11 * 3 = -6.25;
  #          read M_K q = -0.5; y = 3.125.
  np.testing.assert_allclose(state.key_memory[0, 0], [[0.75, -0.25]])
  np.testing.assert_allclose(state.value_memory[0, 0], [[-6.25]])
  np.testing.assert_allclose(y[0, :, 0, 0], [8, 3.125])


def test_chunk_start_gradient_by_hand():
  """Two tokens of one chunk: both gradients are taken at the zero memory."""
  spec = trellis.Spec(
    num_slots=1, phi="identity", read_activation="identity", chunk_size=2
  )
  state = trellis.init_state(
    spec, batch=1, heads=1, key_dim=1, value_dim=1, dtype=jnp.float64
  )
  ones = by_hand.one_head([1.0], [1.0])
  inputs = trellis.Inputs(
    ones, ones, ones, by_hand.one_head([4], [6]), 0 * ones, ones / 2
  )
  state, _ = COMPILED.reference(state, inputs, spec=spec)
  # u = -4 then -6, neither sees the other's write: M = 2 + 3.
  np.testing.assert_allclose(state.key_memory[0, 0], [[5.0]])
  assert int(state.position[0]) == 0


@pytest.mark.parametrize("phi", list(activations.ACTIVATIONS))
def test_write_direction_is_the_gradient_of_the_loss(phi):
  keys = jax.random.split(jax.random.key(0), 3)
  memory, w = (
    jax.random.normal(keys[0], (6, 4)),
    jax.random.normal(keys[1], (4,)),
  )
  target = jax.random.normal(keys[2], (6,))

  def loss(memory):
    output = activations.activate(phi, memory @ w, 1e-3)
    return 0.5 * jnp.sum((output - target) ** 2)

  u = activations.write_direction(phi, memory @ w, target, 1e-3)
  np.testing.assert_allclose(
    jnp.outer(u, w), jax.grad(loss)(memory), atol=1e-12
  )


def test_activations_by_hand():
  x = jnp.array([[3.0, -1.0, 0.5]])
  silu = x / (1 + jnp.exp(-x))
  centred = silu - silu.mean()
  expected = {
    "identity": x,
    "silu": silu,
    "l2": x / jnp.sqrt((x**2).sum() + 0.1),
    "l2_silu": silu / jnp.sqrt((silu**2).sum() + 0.1),
    "ln_silu": centred / jnp.sqrt((centred**2).mean() + 0.1),
    "softmax": jnp.exp(x) / jnp.exp(x).sum(),
  }
  assert set(expected) == set(activations.ACTIVATIONS)
  for name, value in expected.items():
    np.testing.assert_allclose(
      activations.activate(name, x, 0.1), value, rtol=1e-12
    )


def run(spec, inputs, seed=1):
  sizes = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}
  state = MEMORY.make_state(jax.random.key(seed), spec, **sizes)
  return COMPILED.reference(state, inputs, spec=spec)


def inputs_for(spec, time=12, passes=1):
  return MEMORY.make_inputs(
    jax.random.key(0),
    spec,
    batch=2,
    time=time,
    heads=2,
    key_dim=5,
    value_dim=7,
    passes=passes,
  )


def test_identity_phi_is_the_gated_delta_rule():
  """Both passes: M <- beta M (I - ...) as a plain numpy loop."""
  spec = trellis.Spec(num_slots=6, phi="identity", gradient_at="token")
  inputs = inputs_for(spec)
  state = MEMORY.make_state(
    jax.random.key(1), spec, batch=2, heads=2, key_dim=5, value_dim=7
  )
  final, _ = COMPILED.reference(state, inputs, spec=spec)
  for memory, written in (("key_memory", "key"), ("value_memory", "value")):
    M = np.array(getattr(state, memory))
    for t in range(12):
      w = np.array(getattr(inputs, written)[:, t])
      beta = np.exp(inputs.log_decay[:, t, :, 0])[..., None, None]
      gamma = np.array(inputs.write_rate[:, t, :, 0])[..., None, None]
      error = np.einsum("bhmd,bhd->bhm", M, w) - inputs.target[:, t]
      M = beta * M - gamma * error[..., :, None] * w[..., None, :]
    np.testing.assert_allclose(getattr(final, memory), M, rtol=1e-12)


def test_chunk_of_one_is_per_token():
  token = trellis.Spec(num_slots=6, gradient_at="token")
  one = trellis.Spec(num_slots=6, chunk_size=1)
  inputs = inputs_for(token)
  np.testing.assert_array_equal(run(token, inputs)[1], run(one, inputs)[1])


def test_chunk_size_is_meaning():
  exact = run(
    trellis.Spec(num_slots=6, gradient_at="token"),
    inputs_for(trellis.Spec(num_slots=6)),
  )
  stale = run(
    trellis.Spec(num_slots=6, chunk_size=4),
    inputs_for(trellis.Spec(num_slots=6)),
  )
  error = jnp.linalg.norm(exact[1] - stale[1]) / jnp.linalg.norm(exact[1])
  assert error > 0.01


def test_rate_zero_and_no_decay_keep_the_memory():
  spec = trellis.Spec(num_slots=6)
  inputs = inputs_for(spec)
  inputs = inputs._replace(
    write_rate=0 * inputs.write_rate, log_decay=0 * inputs.log_decay
  )
  state = MEMORY.make_state(
    jax.random.key(1), spec, batch=2, heads=2, key_dim=5, value_dim=7
  )
  final, _ = COMPILED.reference(state, inputs, spec=spec)
  np.testing.assert_array_equal(final.key_memory, state.key_memory)
  np.testing.assert_array_equal(final.value_memory, state.value_memory)


def test_forget_gate_off_ignores_the_decay():
  spec = trellis.Spec(num_slots=6, forget_gate=False)
  inputs = inputs_for(spec)
  other = inputs._replace(log_decay=5 * inputs.log_decay)
  np.testing.assert_array_equal(run(spec, inputs)[1], run(spec, other)[1])


def test_separate_gates_drive_their_own_pass():
  spec = trellis.Spec(num_slots=6, gradient_at="token")
  inputs = inputs_for(spec, passes=2)
  changed = inputs._replace(
    write_rate=inputs.write_rate.at[..., 1].multiply(2.0)
  )
  base, other = run(spec, inputs)[0], run(spec, changed)[0]
  np.testing.assert_array_equal(base.key_memory, other.key_memory)
  # The value pass goes by the second gates alone.
  second = changed._replace(
    log_decay=changed.log_decay[..., 1:], write_rate=changed.write_rate[..., 1:]
  )
  errors.assert_close(
    other.value_memory, run(spec, second)[0].value_memory, 1e-13
  )


@pytest.mark.slow
def test_equal_separate_gates_are_the_shared_gate():
  spec = trellis.Spec(num_slots=6, chunk_size=8)
  inputs = inputs_for(spec)
  twice = inputs._replace(
    log_decay=jnp.repeat(inputs.log_decay, 2, axis=-1),
    write_rate=jnp.repeat(inputs.write_rate, 2, axis=-1),
  )
  state = MEMORY.make_state(
    jax.random.key(1), spec, batch=2, heads=2, key_dim=5, value_dim=7
  )
  for function in (COMPILED.reference, COMPILED.chunk):
    shared = function(state, inputs, spec=spec)
    separate = function(state, twice, spec=spec)
    np.testing.assert_allclose(shared[1], separate[1], rtol=1e-12)


@pytest.mark.parametrize("readout", [False, True])
def test_eps_of_a_head_is_the_eps_of_a_spec_for_it(readout):
  def spec(eps):
    return trellis.Spec(num_slots=6, phi_eps=eps, value_readout_phi=readout)

  inputs = inputs_for(spec(1.0))
  eps = jnp.array([0.1, 3.0])
  log_eps = jnp.broadcast_to(jnp.log(eps)[:, None], (2, 12, 2, 1))
  _, y = run(spec(1.0), inputs._replace(log_phi_eps=log_eps))
  for head, value in enumerate(eps):
    _, alone = run(spec(float(value)), inputs)
    np.testing.assert_allclose(y[:, :, head], alone[:, :, head], rtol=1e-10)
    assert jnp.all(y[:, :, 1 - head] != alone[:, :, 1 - head])


def test_value_pass_never_sees_the_key():
  spec = trellis.Spec(num_slots=6)
  inputs = inputs_for(spec)
  other = inputs._replace(key=-2 * inputs.key, query=3 * inputs.query)
  np.testing.assert_array_equal(
    run(spec, inputs)[0].value_memory, run(spec, other)[0].value_memory
  )


@pytest.mark.slow
def test_first_order_changes_gradients_not_values():
  full, first = (
    trellis.Spec(num_slots=6),
    trellis.Spec(num_slots=6, first_order=True),
  )
  inputs = inputs_for(full)
  np.testing.assert_array_equal(run(full, inputs)[1], run(first, inputs)[1])

  def gradient(spec):
    return jax.grad(lambda inputs: jnp.sum(run(spec, inputs)[1]))(inputs)

  # Queries only read: what is left out are derivatives of the writes.
  second_order, first_order = gradient(full), gradient(first)
  errors.assert_close(first_order.query, second_order.query, 1e-13)
  assert errors.relative_rms(first_order.key, second_order.key) > 0.01


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("num_slots", 0),
    ("phi", "tanh"),
    ("phi_eps", 0.0),
    ("read_activation", ""),
    ("read_eps", -1.0),
    ("gradient_at", "chunk"),
    ("chunk_size", 0),
  ],
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    trellis.Spec(**{field: value})


def test_chunk_names_the_input_of_wrong_shape():
  spec = trellis.Spec(num_slots=6)
  inputs = inputs_for(spec)
  state = trellis.init_state(spec, batch=2, heads=2, key_dim=5, value_dim=7)
  with pytest.raises(ValueError, match=r"value has shape .* expected"):
    trellis.chunk(state, inputs._replace(value=inputs.key), spec=spec)
  with pytest.raises(ValueError, match=r"log_phi_eps has shape .* expected"):
    trellis.chunk(state, inputs._replace(log_phi_eps=inputs.key), spec=spec)
  with pytest.raises(
    ValueError, match=r"key_memory_start is given, but chunked"
  ):
    trellis.chunk(
      state, inputs, spec=trellis.Spec(num_slots=6, gradient_at="token")
    )
  with pytest.raises(NotImplementedError, match="no library_gpu"):
    trellis.chunk(state, inputs, spec=spec, implementation="library_gpu")
  with pytest.raises(NotImplementedError, match="has no fast implementation"):
    trellis.chunk(state, inputs, spec=spec, implementation="fast")
  with pytest.raises(ValueError, match="at least float32"):
    trellis.init_state(
      spec, batch=1, heads=1, key_dim=1, value_dim=1, dtype=jnp.bfloat16
    )
