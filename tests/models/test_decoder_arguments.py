"""A decoder without rows or tokens, and with what is neither."""

import dataclasses

import decoder_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.parametrize("shape", [(0, 14), (2, 0)], ids=str)
def test_nothing_gives_nothing(shape):
  """No rows, or no tokens."""
  config = cases.config("gated_delta_net")
  model = cases.build(dataclasses.replace(config, channel_mixer="relu2_shift"))

  def whole(tokens):
    logits, state = model(tokens, state=model.init_state(len(tokens)))
    return logits, model(tokens), model.step(jnp.ones(len(tokens), int), state)

  logits, alone, (step, _) = jax.eval_shape(
    whole, jax.ShapeDtypeStruct(shape, jnp.int32)
  )
  assert logits.shape == alone.shape == (*shape, 50)
  assert step.shape == (shape[0], 50)


@pytest.mark.parametrize(
  "mixer", ["softmax_attention", "key_value_means", "infini_attention"]
)
def test_nothing_gives_nothing_where_memories_grow(mixer):
  model = cases.build(cases.config(mixer))
  state = model.init_state(2)
  none = jnp.zeros((2, 0), jnp.int32)
  assert model(none).shape == (2, 0, 50)
  logits, after = model(none, state=state, segment_ids=none)
  assert logits.shape == (2, 0, 50)
  np.testing.assert_array_equal(after.segment_id, state.segment_id)
  nobody = jax.eval_shape(
    lambda: model.step(jnp.zeros(0, int), model.init_state(0))
  )
  assert nobody[0].shape == (0, 50)


def test_tokens_that_are_none_are_one_line():
  model = cases.build(cases.config("linear_attention"))
  ids = jnp.ones((2, 4), int)
  for tokens in (ids[0], ids[None], ids.astype(float)):
    with pytest.raises(ValueError, match=r"expected integers \[batch, time\]"):
      model(tokens)
  with pytest.raises(ValueError, match=r"expected integers \[batch\]"):
    model.step(ids, model.init_state(2))
  with pytest.raises(ValueError, match=r"expected \(2, 4\), as tokens"):
    model(ids, segment_ids=jnp.ones((2, 5), int))
  no_array = "is of type list, expected an array"
  with pytest.raises(TypeError, match=f"Decoder: tokens {no_array}"):
    model([[1, 2, 3]])
  with pytest.raises(TypeError, match=f"Decoder: segment_ids {no_array}"):
    model(ids, segment_ids=[[1] * 4] * 2)
  with pytest.raises(TypeError, match=f"Decoder: tokens {no_array}"):
    model.step([1], model.init_state(1))
  with pytest.raises(TypeError, match="tokens is of type NoneType, expected"):
    model(None)
  with pytest.raises(TypeError, match=r"state is missing.*init_state\(2\)"):
    model.step(ids[:, 0], None)
  with pytest.raises(TypeError, match="state is of type tuple; make it by"):
    model(ids, state=(1, 2))


@pytest.mark.parametrize("dtype", [jnp.int64, jnp.uint32])
def test_segment_ids_of_any_integers_leave_the_state_as_it_is(dtype):
  with jax.enable_x64(True):
    model = cases.build(cases.config("linear_attention"))
    state = model.init_state(2)
    _, after = jax.eval_shape(
      lambda ids: model(jnp.zeros((2, 5), int), state=state, segment_ids=ids),
      jnp.ones((2, 5), dtype),
    )
  assert after.segment_id.dtype == state.segment_id.dtype == jnp.int32
