"""Level 1: the reference is Infini-attention."""

import dataclasses

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import infini_attention
from memcomp_kernels.chunking import form
from memcomp_kernels.infini_attention import reference
from memcomp_kernels.testing import memories

COMPILED = programs.of(infini_attention)
MEMORY = memories.MEMORIES["infini_attention"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 6, "value_dim": 5}
SEGMENTS = infini_attention.Spec(segment_size=4)
TOKEN = infini_attention.Spec(segment_size=1, window_size=4)


pytestmark = pytest.mark.usefixtures("float64")


def inputs_for(spec, time=12):
  return MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)


def run(spec, inputs, function=COMPILED.reference):
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)
  return function(state, inputs, spec=spec)


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_segments_by_hand(function):
  """Features are k + 1 here (k >= 0); eps = 1; local weights are equal.

  Segment 1: the memory is empty, tokens read 0 from it. k = 0 twice has feature
    1, values 4 and 8: M = 12, z = 2. Local means: 4, 6; halved by the gate.
  Segment 2: k = 1, feature 2, v = 9. It would be answered 2 * 12 / (2 * 2 + 1)
    = 24/5: delta writes 2 * (9 - 24/5) = 42/5. q = 3, feature 4, reads 4 * 12 /
    (4 * 2 + 1) = 16/3. Local: 9 alone.
  """
  zero = by_hand.one_head([0], [0], [0])
  inputs = infini_attention.Inputs(
    query=zero,
    key=zero,
    value=by_hand.one_head([4], [8], [9]),
    read_gate=by_hand.one_head([0.5], [0.5], [0.25]),
    memory_query=by_hand.one_head([5], [0], [3]),
    memory_key=by_hand.one_head([0], [0], [1]),
  )
  for rule, written in (("delta", 42 / 5), ("linear", 18)):
    spec = infini_attention.Spec(segment_size=2, rule=rule, eps=1.0)
    state = infini_attention.init_state(
      spec, batch=1, heads=1, key_dim=1, value_dim=1, dtype=jnp.float64
    )
    state, y = function(state, inputs, spec=spec)
    expected = [2, 3, 0.25 * 16 / 3 + 0.75 * 9]
    np.testing.assert_allclose(y[0, :, 0, 0], expected, rtol=1e-14)
    memory, normalizer = state.association
    np.testing.assert_allclose(memory[0, 0, 0, 0], 12 + written, rtol=1e-14)
    np.testing.assert_allclose(normalizer[0, 0, 0], 4, rtol=1e-14)
    np.testing.assert_allclose(state.start.memory[0, 0, 0, 0], 12, rtol=1e-14)
    assert int(state.position[0]) == 3


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_tokens_by_hand(function):
  """Features are 1 and 2, eps = 1, the memory alone is read.

  Token 1 (feature 1, v = 6): reads 0, writes 6: M = 6, z = 1.
  Token 2 (feature 2, v = 5): met 2 * 6 / (2 + 1) = 4, which its query (feature
    2) reads, too. Delta writes 2 * (5 - 4) = 2: M = 8, z = 3.
  Token 3 (query feature 1) reads 8 / (3 + 1) = 2.
  """
  inputs = infini_attention.Inputs(
    query=by_hand.one_head([0], [1], [0]),
    key=by_hand.one_head([0], [1], [0]),
    value=by_hand.one_head([6], [5], [0]),
    read_gate=by_hand.one_head([1], [1], [1]),
  )
  spec = infini_attention.Spec(segment_size=1, window_size=2, eps=1.0)
  state = infini_attention.init_state(
    spec, batch=1, heads=1, key_dim=1, value_dim=1, dtype=jnp.float64
  )
  _, y = function(state, inputs, spec=spec)
  np.testing.assert_allclose(y[0, :, 0, 0], [0, 4, 2], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("rule", rotation.cases(["linear", "delta"], ["delta"]))
def test_a_segment_is_written_at_once(rule):
  """Equations (3) to (6) of whole segments, as the paper prints them."""
  spec = dataclasses.replace(SEGMENTS, rule=rule)
  inputs = inputs_for(spec)
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)
  M, z = state.association
  outputs = []
  for start in range(0, 12, 4):
    q, k, v, g, memory_q, memory_k = (
      jnp.swapaxes(x[:, start : start + 4], 1, 2) for x in inputs
    )
    sq, sk = reference.sigma(memory_q), reference.sigma(memory_k)
    A_mem = sq @ M / (sq @ z[..., None] + spec.eps)
    scores = q @ jnp.swapaxes(k, -1, -2) / 6**0.5
    scores = jnp.where(jnp.tril(jnp.ones((4, 4))) > 0, scores, -jnp.inf)
    A_dot = jax.nn.softmax(scores) @ v
    outputs.append(g * A_mem + (1 - g) * A_dot)
    if rule == "delta":
      v = v - sk @ M / (sk @ z[..., None] + spec.eps)
    M, z = M + jnp.swapaxes(sk, -1, -2) @ v, z + sk.sum(2)
  final, y = run(spec, inputs)
  expected = jnp.swapaxes(jnp.concatenate(outputs, axis=2), 1, 2)
  np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)
  np.testing.assert_allclose(final.association.memory, M, rtol=1e-10)
  np.testing.assert_allclose(final.association.normalizer, z, rtol=1e-12)


def test_gate_zero_is_local_attention():
  spec = infini_attention.Spec(segment_size=1, window_size=12)
  inputs = inputs_for(spec)
  inputs = inputs._replace(read_gate=0 * inputs.read_gate)
  scores = jnp.einsum("bthk,bihk->bhti", inputs.query, inputs.key) / 6**0.5
  scores = jnp.where(jnp.tril(jnp.ones((12, 12))) > 0, scores, -jnp.inf)
  expected = jnp.einsum("bhti,bihv->bthv", jax.nn.softmax(scores), inputs.value)
  np.testing.assert_allclose(run(spec, inputs)[1], expected, rtol=1e-10)


def test_a_repeated_pair():
  """The linear rule answers the mean of what was written to a key: v.

  The delta rule writes nothing where v is answered, but the sum grows: the
  third token is answered v / 2.
  """
  inputs = inputs_for(TOKEN, 9)
  inputs = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :1], x.shape), inputs)
  inputs = inputs._replace(
    query=inputs.key, read_gate=jnp.ones_like(inputs.read_gate)
  )

  def answers(rule):
    spec = dataclasses.replace(TOKEN, rule=rule, eps=1e-12)
    state = infini_attention.init_state(spec, **SIZES, dtype=jnp.float64)
    return COMPILED.reference(state, inputs, spec=spec)[1]

  value = inputs.value
  y = answers("linear")
  np.testing.assert_allclose(y[:, 1:], value[:, 1:], rtol=1e-9)
  y = answers("delta")
  np.testing.assert_allclose(y[:, 1], value[:, 1], rtol=1e-9)
  np.testing.assert_allclose(y[:, 2], value[:, 2] / 2, rtol=1e-9)


@pytest.mark.slow
def test_memory_keys_default_to_local_ones():
  inputs = inputs_for(SEGMENTS)._replace(memory_query=None, memory_key=None)
  same = inputs._replace(memory_query=inputs.query, memory_key=inputs.key)
  for function in (COMPILED.reference, COMPILED.chunk):
    np.testing.assert_array_equal(
      run(SEGMENTS, inputs, function)[1], run(SEGMENTS, same, function)[1]
    )


def test_segment_size_is_meaning():
  inputs = inputs_for(TOKEN)
  token = run(TOKEN, inputs)[1]
  stale = run(dataclasses.replace(TOKEN, segment_size=4), inputs)[1]
  assert jnp.linalg.norm(token - stale) > 0.01 * jnp.linalg.norm(token)


@pytest.mark.parametrize(
  ("field", "value"),
  [("segment_size", 0), ("window_size", 0), ("rule", "outer"), ("eps", 0.0)],
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    infini_attention.Spec(**{field: value})


def test_chunk_names_what_does_not_fit():
  inputs = inputs_for(SEGMENTS)
  state = infini_attention.init_state(SEGMENTS, **SIZES)
  for name in inputs._fields:
    wrong = inputs._replace(**{name: jnp.zeros((2, 12, 2, 9))})
    with pytest.raises(ValueError, match=rf"{name} has shape .* expected"):
      infini_attention.chunk(state, wrong, spec=SEGMENTS)
  with pytest.raises(ValueError, match=r"state\.start is given.*same spec"):
    infini_attention.chunk(state, inputs, spec=TOKEN)
  with pytest.raises(ValueError, match=r"state\.keys has shape .* window="):
    infini_attention.chunk(
      state, inputs, spec=infini_attention.Spec(segment_size=3)
    )
  with pytest.raises(ValueError, match="tile_time="):
    form.Tiling(tile_time=0)
