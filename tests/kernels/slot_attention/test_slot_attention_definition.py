"""Level 1: the reference is the papers' slot attention."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import slot_attention
from memcomp_kernels.testing import memories

COMPILED = programs.of(slot_attention)
MEMORY = memories.MEMORIES["slot_attention"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 4}


pytestmark = pytest.mark.usefixtures("float64")


def fresh(spec, key_dim, value_dim):
  return slot_attention.init_state(
    spec,
    batch=1,
    heads=1,
    key_dim=key_dim,
    value_dim=value_dim,
    dtype=jnp.float64,
  )


def test_gated_by_hand():
  """Two slots, keys and values of one feature; decays 1/2 and 1/4, then 1/2.

  Token 1 (k = 2, v = 4): K = (1/2 * 2, 3/4 * 2) = (1, 3/2), V = (2, 3).
    Read q = log 2 / (1/2): scores differ by log 2: p = (1/3, 2/3), y = 8/3.
  Token 2 (k = 0, v = 8): K = (1/2, 3/4), V = (1 + 4, 3/2 + 4) = (5, 11/2).
    Read q = 0: p = (1/2, 1/2), y = 21/4.
  """
  spec = slot_attention.Spec(num_slots=2)
  inputs = slot_attention.Inputs(
    query=by_hand.one_head([2 * np.log(2)], [0.0]),
    key=by_hand.one_head([2.0], [0.0]),
    value=by_hand.one_head([4.0], [8.0]),
    log_decay=jnp.log(by_hand.one_head([0.5, 0.25], [0.5, 0.5])),
  )
  state, y = COMPILED.reference(fresh(spec, 1, 1), inputs, spec=spec)
  np.testing.assert_allclose(state.key_memory[0, 0, :, 0], [0.5, 0.75])
  np.testing.assert_allclose(state.value_memory[0, 0, :, 0], [5, 5.5])
  np.testing.assert_allclose(y[0, :, 0, 0], [8 / 3, 21 / 4])


def test_softmax_by_hand():
  """Slot 1 weighs the tokens 1 : 3, slot 2 equally.

  After token 2 (k = 0 then 4, v = 0 then 8): K = (3, 2), V = (6, 4). Read q =
  log 3: p = (3/4, 1/4), y = 11/2. Token 1 is read from itself alone: y = 0.
  """
  spec = slot_attention.Spec(num_slots=2, rule="softmax")
  inputs = slot_attention.Inputs(
    query=by_hand.one_head([1.0], [np.log(3)]),
    key=by_hand.one_head([0.0], [4.0]),
    value=by_hand.one_head([0.0], [8.0]),
    write_logit=jnp.log(by_hand.one_head([2.0, 5.0], [6.0, 5.0])),
  )
  state, y = COMPILED.reference(fresh(spec, 1, 1), inputs, spec=spec)
  np.testing.assert_allclose(state.key_memory[0, 0, :, 0], [3, 2])
  np.testing.assert_allclose(state.value_memory[0, 0, :, 0], [6, 4])
  np.testing.assert_allclose(jnp.exp(state.log_total[0, 0]), [8, 10])
  np.testing.assert_allclose(y[0, :, 0, 0], [0, 5.5], atol=1e-15)


def inputs_for(spec, time=12):
  return MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)


def run(spec, inputs, function=COMPILED.chunk):
  state = slot_attention.init_state(spec, **SIZES, dtype=jnp.float64)
  return function(state, inputs, spec=spec)


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_slots_of_softmax_are_averages_over_tokens(function):
  """ABC as it is printed: sums over tokens, divided by the sum of weights."""
  spec = slot_attention.Spec(num_slots=3, rule="softmax", scale=None)
  inputs = inputs_for(spec)
  _, y = run(spec, inputs, function)
  weight = jnp.exp(inputs.write_logit)
  total = jnp.cumsum(weight, 1)[..., None]

  def average(x):
    return jnp.cumsum(weight[..., None] * x[..., None, :], 1) / total

  scores = jnp.einsum("bthk,bthmk->bthm", inputs.query, average(inputs.key))
  p = jax.nn.softmax(5**-0.5 * scores, axis=-1)
  expected = jnp.einsum("bthm,bthmv->bthv", p, average(inputs.value))
  np.testing.assert_allclose(y, expected, rtol=1e-10)


def test_a_slot_that_forgets_all_holds_the_last_token():
  spec = slot_attention.Spec(num_slots=3)
  inputs = inputs_for(spec)
  inputs = inputs._replace(log_decay=jnp.full_like(inputs.log_decay, -1e4))
  state, y = run(spec, inputs)
  np.testing.assert_allclose(y, inputs.value, rtol=1e-12)
  expected = jnp.broadcast_to(inputs.key[:, -1, :, None], (2, 2, 3, 5))
  np.testing.assert_allclose(state.key_memory, expected, rtol=1e-12)


def test_without_decay_nothing_is_written():
  spec = slot_attention.Spec(num_slots=3)
  inputs = inputs_for(spec)
  inputs = inputs._replace(log_decay=0 * inputs.log_decay)
  state, y = run(spec, inputs)
  assert not jnp.any(y) and not jnp.any(state.key_memory)


def test_one_slot_is_a_moving_average_of_values():
  """Attention over one slot is that slot, whatever is asked."""
  spec = slot_attention.Spec(num_slots=1)
  inputs = inputs_for(spec)
  expected, y = jnp.zeros((2, 2, 4)), run(spec, inputs)[1]
  for t in range(12):
    decay = jnp.exp(inputs.log_decay[:, t])
    expected = decay * expected + (1 - decay) * inputs.value[:, t]
    np.testing.assert_allclose(y[:, t], expected, rtol=1e-12)


def test_a_constant_added_to_logits_changes_nothing():
  spec = slot_attention.Spec(num_slots=3, rule="softmax")
  inputs = inputs_for(spec)
  moved = inputs._replace(write_logit=inputs.write_logit - 500)
  np.testing.assert_allclose(
    run(spec, moved)[1], run(spec, inputs)[1], rtol=1e-10
  )


def test_scale_is_of_the_scores():
  spec, inputs = slot_attention.Spec(num_slots=3, scale=None), None
  inputs = inputs_for(spec)
  halved = inputs._replace(query=5**-0.5 * inputs.query)
  one = slot_attention.Spec(num_slots=3)
  np.testing.assert_allclose(
    run(spec, inputs)[1], run(one, halved)[1], rtol=1e-12
  )


@pytest.mark.parametrize(
  ("field", "value"), [("num_slots", 0), ("rule", "mean"), ("scale", 0.0)]
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    slot_attention.Spec(**{field: value})


def test_chunk_names_what_does_not_fit():
  spec = slot_attention.Spec(num_slots=3)
  inputs = inputs_for(spec)
  state = slot_attention.init_state(spec, **SIZES)
  with pytest.raises(
    ValueError, match="log_decay is missing, but rule='gated'"
  ):
    slot_attention.chunk(state, inputs._replace(log_decay=None), spec=spec)
  with pytest.raises(
    ValueError, match="write_logit is given, but rule='gated'"
  ):
    slot_attention.chunk(
      state, inputs._replace(write_logit=inputs.log_decay), spec=spec
    )
  with pytest.raises(ValueError, match=r"state\.key_memory has .* num_slots=4"):
    slot_attention.chunk(state, inputs, spec=slot_attention.Spec(num_slots=4))
  with pytest.raises(ValueError, match=r"state\.log_total is missing"):
    slot_attention.chunk(
      state, inputs, spec=slot_attention.Spec(num_slots=3, rule="softmax")
    )
  with pytest.raises(NotImplementedError, match="no mosaic_gpu"):
    slot_attention.chunk(state, inputs, spec=spec, implementation="mosaic_gpu")
  with pytest.raises(ValueError, match="at least float32"):
    slot_attention.init_state(spec, **SIZES, dtype=jnp.bfloat16)
