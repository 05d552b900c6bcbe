"""Level 1: the reference is softmax attention over what the Spec says."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import softmax_attention
from memcomp_kernels.softmax_attention import tile
from memcomp_kernels.testing import errors, gradients, memories, subjects

COMPILED = programs.of(softmax_attention)
MEMORY = memories.MEMORIES["softmax_attention"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}


pytestmark = pytest.mark.usefixtures("float64")


def inputs_for(time):
  return MEMORY.make_inputs(jax.random.key(0), None, time=time, **SIZES)


def fresh(spec, length=32):
  return softmax_attention.init_state(
    spec, dtype=jnp.float64, length=length, **SIZES
  )


def test_two_tokens_by_hand():
  """Scores log 1 and log 3: the second output is (v_1 + 3 v_2) / 4."""
  spec = softmax_attention.Spec(scale=1.0)
  state = softmax_attention.init_state(
    spec,
    batch=1,
    heads=1,
    key_dim=1,
    value_dim=1,
    dtype=jnp.float64,
    length=2,
  )

  def one_head(*x):
    return jnp.array(x, jnp.float64)[None, :, None, None]

  inputs = softmax_attention.Inputs(
    query=one_head(5, 1), key=one_head(0, math.log(3)), value=one_head(8, 4)
  )
  state, y = COMPILED.reference(state, inputs, spec=spec)
  np.testing.assert_allclose(y[0, :, 0, 0], [8, 5])
  np.testing.assert_allclose(state.values[0, 0, :, 0], [8, 4])
  assert int(state.position[0]) == 2


SEEN = {
  "full": (softmax_attention.Spec(), lambda p, j: True),
  "window": (softmax_attention.Spec(window_size=4), lambda p, j: p - j < 4),
  "sinks": (
    softmax_attention.Spec(window_size=6, sink_tokens=2),
    lambda p, j: p - j < 4 or j < 2,
  ),
  "blocks": (
    softmax_attention.Spec(window_size=6, chunk_size=3),
    lambda p, j: j >= (p // 3 + 1) * 3 - 6,
  ),
}


@pytest.mark.parametrize("name", list(SEEN))
def test_what_each_spec_sees(name):
  """A plain numpy loop over pairs of positions."""
  spec, seen = SEEN[name]
  inputs = inputs_for(15)
  _, y = COMPILED.reference(fresh(spec), inputs, spec=spec)
  q, k, v = (np.array(x) for x in inputs[:3])
  for p in range(15):
    js = [j for j in range(p + 1) if seen(p, j)]
    scores = np.einsum("bhd,bjhd->bhj", q[:, p], k[:, js]) / np.sqrt(5)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhj,bjhd->bhd", weights, v[:, js])
    np.testing.assert_allclose(y[:, p], expected, rtol=1e-10)


def test_full_attention_is_the_library_s():
  inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs_for(20))
  state = gradients.cast(fresh(softmax_attention.Spec()), jnp.float32)
  _, y = COMPILED.chunk(
    state, inputs, spec=softmax_attention.Spec(), max_position=0
  )
  # Widths of keys and values are one there.
  expected = jax.nn.dot_product_attention(
    inputs.query, inputs.key, inputs.value[..., :5], is_causal=True
  )
  np.testing.assert_allclose(y[..., :5], expected, rtol=1e-4, atol=1e-5)


def test_a_window_as_long_as_the_text_is_full_attention():
  inputs = inputs_for(15)
  full = COMPILED.reference(
    fresh(softmax_attention.Spec()), inputs, spec=softmax_attention.Spec()
  )[1]
  for changes in ({}, {"sink_tokens": 3}):
    spec = softmax_attention.Spec(window_size=15, **changes)
    y = COMPILED.reference(fresh(spec), inputs, spec=spec)[1]
    np.testing.assert_allclose(y, full, rtol=1e-12)


def test_more_tokens_than_the_state_holds_push_the_oldest_out():
  inputs = inputs_for(15)
  full = COMPILED.chunk(
    fresh(softmax_attention.Spec(), length=6),
    inputs,
    spec=softmax_attention.Spec(),
  )[1]
  spec = softmax_attention.Spec(window_size=6)
  window = COMPILED.chunk(fresh(spec), inputs, spec=spec)[1]
  np.testing.assert_allclose(full, window, rtol=1e-12)


@pytest.mark.parametrize(
  ("name", "length", "packed"),
  rotation.cases(
    [
      (name, length, packed)
      for name, length in (("full", 32), ("full", 45), ("window-sinks", 32))
      for packed in (False, True)
    ],
  ),
)
def test_tiles_never_change_the_result(monkeypatch, name, length, packed):
  """Small tiles, the last not full.

  Several a part where all tokens are seen, two back in a window; a state of
  fewer tokens than the call is a window, too.
  """
  spec = MEMORY.specs[name]
  if name == "window-sinks":
    spec = dataclasses.replace(spec, window_size=15)
  state, inputs = fresh(spec, length), inputs_for(45)
  ids = None
  if packed:
    ids = jnp.asarray(np.arange(45)[None] // 19 + np.ones((2, 1)), jnp.int32)
    ids = ids.at[1, 3:9].set(0)

  def run(function):
    return gradients.value_and_gradients(
      lambda state, inputs: function(
        state, inputs, spec=spec, segment_ids=ids, reset_state=state
      ),
      (state, inputs),
    )

  monkeypatch.setattr(tile, "full_tile", lambda keys: 4)
  monkeypatch.setattr(tile, "window_tile", lambda ring: 8)
  subjects.assert_agree(
    run(softmax_attention.chunk), run(softmax_attention.reference), "tiles"
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "window-sinks"])
def test_a_bound_of_what_was_seen_changes_nothing(name):
  spec = MEMORY.specs[name]
  inputs = inputs_for(40)
  first = jax.tree.map(lambda x: x[:, :3], inputs)
  rest = jax.tree.map(lambda x: x[:, 3:], inputs)
  state, y = COMPILED.chunk(fresh(spec, 48), first, spec=spec, max_position=0)
  state, z = COMPILED.chunk(state, rest, spec=spec, max_position=3)
  expected = COMPILED.reference(fresh(spec, 48), inputs, spec=spec)
  errors.assert_close(
    (state, jnp.concatenate([y, z], axis=1)), expected, 1e-12, "max_position"
  )


@pytest.mark.parametrize(
  "fields",
  [
    {"window_size": 0},
    {"chunk_size": 0, "window_size": 4},
    {"sink_tokens": -1},
    {"sink_tokens": 4, "window_size": 4},
    {"chunk_size": 3, "window_size": 4},
    {"chunk_size": 3},
    {"chunk_size": 2, "window_size": 4, "sink_tokens": 1},
    {"scale": 0.0},
  ],
)
def test_spec_names_the_field_out_of_range(fields):
  name, value = next(iter(fields.items()))
  with pytest.raises(ValueError, match=f"^{name}={value}"):
    softmax_attention.Spec(**fields)


def test_chunk_names_the_input_of_wrong_shape():
  spec = softmax_attention.Spec(window_size=6)
  state, inputs = fresh(spec), inputs_for(4)
  with pytest.raises(ValueError, match=r"value has shape .* expected"):
    softmax_attention.chunk(state, inputs._replace(value=inputs.key), spec=spec)
  with pytest.raises(ValueError, match=r"holds 6 tokens, spec\.window_size"):
    softmax_attention.chunk(
      state, inputs, spec=softmax_attention.Spec(window_size=7)
    )
  with pytest.raises(ValueError, match="at least float32"):
    softmax_attention.init_state(spec, dtype=jnp.bfloat16, **SIZES)
  with pytest.raises(ValueError, match="length must be the tokens"):
    softmax_attention.init_state(softmax_attention.Spec(), **SIZES)
