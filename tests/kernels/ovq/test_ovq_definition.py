"""Level 1: the reference is online vector quantisation as it was released."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import ovq
from memcomp_kernels.ovq import dictionary
from memcomp_kernels.testing import memories, memory

COMPILED = programs.of(ovq)
MEMORY = memories.MEMORIES["ovq"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 4}


pytestmark = pytest.mark.usefixtures("float64")


def test_by_hand():
  """Chunks of two, rows as many as tokens up to 3; queries of zero.

  Tokens 1, 2: y = 0, (0 + 4) / 2. They found rows 0 and 1, values 0 and 4.
  Token 3 sees both rows and itself: (0 + 4 + 8) / 3 = 4.
  Token 4: (0 + 4 + 8 + 12) / 4 = 6. One more row is founded: token 3's best
    product is 0.6 with row 0, token 4's is 0.8: it is token 3. Token 4 joins
    row 1, key (0, 1): mean (0.3, 0.9), value (4 + 12) / 2 = 8, count 2.
  Token 5 sees rows of 0, 8 (twice) and 8, itself 16: (16 + 8 + 16) / 5 = 8.
  """
  spec = ovq.Spec(chunk_size=2, max_rows=3, growth="linear")
  state = ovq.init_state(
    spec, batch=1, heads=1, key_dim=2, value_dim=1, dtype=jnp.float64
  )
  keys = by_hand.one_head([1, 0], [0, 1], [0.6, -0.8], [0.6, 0.8], [1, 0])
  inputs = ovq.Inputs(
    query=0 * keys,
    key=keys,
    value=by_hand.one_head([0.0], [4.0], [8.0], [12.0], [16.0]),
  )
  state, y = COMPILED.reference(state, inputs, spec=spec)
  np.testing.assert_allclose(y[0, :, 0, 0], [0, 2, 4, 6, 8], atol=1e-15)
  expected = [[1, 0], [0.3, 0.9], [0.6, -0.8]]
  np.testing.assert_allclose(state.keys[0, 0], expected)
  np.testing.assert_allclose(state.values[0, 0, :, 0], [0, 8, 8])
  np.testing.assert_allclose(state.counts[0, 0], [1, 2, 1])
  np.testing.assert_allclose(state.pending_values[0, 0, :, 0], [16, 0])
  assert int(state.position[0]) == 1


def test_first_chunk_by_hand():
  """Products with the first key: 1, 0.8, -1, 0, 0.6, of which two are least."""
  keys = jnp.array([[1, 0], [0.8, 0.6], [-1, 0], [0, 1], [0.6, -0.8]])
  spec = ovq.Spec(chunk_size=5, max_rows=7)
  assert spec.rows(5) == 2  # floor(35 / 12)
  assert spec.rows(10) == 4  # floor(70 / 17)
  spec = ovq.Spec(chunk_size=5, max_rows=9)  # floor(45 / 14) = 3
  empty = dictionary.Dictionary(
    jnp.zeros((1, 1, 9, 2)), jnp.zeros((1, 1, 9, 1)), jnp.zeros((1, 1, 9))
  )
  joined = dictionary.assign(empty, keys[None, None], spec)
  np.testing.assert_array_equal(joined[0, 0], [0, 0, 1, 2, 0])


@pytest.mark.parametrize("rows", [2, 7, 1024])
def test_growth_is_the_floor_of_the_formula(rows):
  spec = ovq.Spec(max_rows=rows)
  tokens = np.arange(0, 5000, 7)
  expected = [int(t) * rows // (int(t) + rows) for t in tokens]
  np.testing.assert_array_equal(spec.rows(tokens), expected)
  np.testing.assert_array_equal(spec.rows(jnp.array(tokens)), expected)
  linear = ovq.Spec(max_rows=rows, growth="linear")
  np.testing.assert_array_equal(linear.rows(tokens), np.minimum(tokens, rows))


def inputs_for(spec, time=23):
  return MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)


def run(spec, inputs, function=COMPILED.chunk):
  state = ovq.init_state(spec, **SIZES, dtype=jnp.float64)
  return function(state, inputs, spec=spec)


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_within_the_first_chunk_it_is_attention(function):
  spec = ovq.Spec(chunk_size=32, max_rows=8)
  inputs = inputs_for(spec)
  _, y = run(spec, inputs, function)
  scores = jnp.einsum("bthk,bjhk->bhtj", inputs.query, inputs.key)
  scores = jnp.where(jnp.tril(jnp.ones((23, 23), bool)), scores, -jnp.inf)
  p = jax.nn.softmax(scores, axis=-1)
  expected = jnp.einsum("bhtj,bjhv->bthv", p, inputs.value)
  np.testing.assert_allclose(y, expected, rtol=1e-10)


def test_a_row_for_every_token_is_attention():
  """With rows to spare nothing is merged."""
  spec = ovq.Spec(chunk_size=4, max_rows=64, growth="linear")
  long = ovq.Spec(chunk_size=32, max_rows=8)
  inputs = inputs_for(spec)
  np.testing.assert_allclose(
    run(spec, inputs)[1], run(long, inputs)[1], rtol=1e-9
  )


def test_rows_are_means_of_their_tokens():
  """Sums over rows, by their counts, are sums over tokens."""
  spec = ovq.Spec(chunk_size=5, max_rows=9)
  inputs = inputs_for(spec, 20)
  state, _ = run(spec, inputs)
  np.testing.assert_allclose(state.counts.sum(-1), 20)
  assert int((state.counts[0, 0] > 0).sum()) == spec.rows(20) == 6
  sums = (state.counts[..., None] * state.values).sum(2)
  np.testing.assert_allclose(sums, inputs.value.sum(1), rtol=1e-10)


@pytest.mark.slow
def test_equal_tokens_weigh_as_many_as_they_are():
  """With the bias; without it the merged row weighs as one."""
  inputs = inputs_for(None, 8)
  key = memory.unit(inputs.key[:, :1])
  inputs = inputs._replace(
    key=jnp.broadcast_to(key, inputs.key.shape),
    query=0 * inputs.query,
    value=jnp.broadcast_to(
      jnp.array([1.0] * 7 + [9.0])[:, None, None], inputs.value.shape
    ),
  )
  spec = ovq.Spec(chunk_size=7, max_rows=1, growth="linear")
  np.testing.assert_allclose(run(spec, inputs)[1][:, 7], 2)
  spec = ovq.Spec(chunk_size=7, max_rows=1, growth="linear", count_bias=False)
  np.testing.assert_allclose(run(spec, inputs)[1][:, 7], 5)


@pytest.mark.slow
def test_rows_of_length_one():
  spec = ovq.Spec(chunk_size=5, max_rows=9, normalize_rows=True)
  state, _ = run(spec, inputs_for(spec, 20))
  used = state.counts > 0
  for rows in (state.keys, state.values):
    length = jnp.linalg.norm(rows, axis=-1)
    np.testing.assert_allclose(length, used, rtol=1e-12)


@pytest.mark.parametrize(
  ("field", "value"), [("chunk_size", 0), ("max_rows", 0), ("growth", "log")]
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    ovq.Spec(**{field: value})


def test_a_plateau_of_one_row_is_refused():
  """It would have floor(t / (t + 1)) = 0 rows: no memory at all."""
  with pytest.raises(ValueError, match="max_rows=1 never has a row"):
    ovq.Spec(max_rows=1)


def test_chunk_names_what_does_not_fit():
  spec = ovq.Spec(chunk_size=4, max_rows=8)
  inputs = inputs_for(spec)
  state = ovq.init_state(spec, **SIZES)
  with pytest.raises(ValueError, match=r"value has shape .* expected"):
    ovq.chunk(state, inputs._replace(value=inputs.key), spec=spec)
  with pytest.raises(ValueError, match=r"pending_keys has .* chunk_size=5"):
    ovq.chunk(state, inputs, spec=ovq.Spec(chunk_size=5, max_rows=8))
  with pytest.raises(NotImplementedError, match="no mosaic_gpu"):
    ovq.chunk(state, inputs, spec=spec, implementation="mosaic_gpu")
  with pytest.raises(ValueError, match="at least float32"):
    ovq.init_state(spec, **SIZES, dtype=jnp.bfloat16)
