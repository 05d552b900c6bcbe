"""Level 1: the reference is linear attention."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import linear_attention
from memcomp_kernels.chunking import form
from memcomp_kernels.linear_attention import reference
from memcomp_kernels.testing import memories

COMPILED = programs.of(linear_attention)
MEMORY = memories.MEMORIES["linear_attention"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 6, "value_dim": 5}


pytestmark = pytest.mark.usefixtures("float64")


def inputs_for(spec, time=12):
  return MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)


def fresh(spec, **sizes):
  return linear_attention.init_state(spec, **(SIZES | sizes), dtype=jnp.float64)


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_by_hand(function):
  """Features relu, scale 1, eps 1, decay 1/2 at the second token.

  Token 1: k = (1, -3) has features (1, 0), v = 6: S = (6, 0), z = (1, 0).
    q = (2, 5): 12 / (2 + 1) = 4.
  Token 2: k = (0, 2), v = 5: S = (3, 10), z = (1/2, 2). q = (2, 1):
    (6 + 10) / (1 + 2 + 1) = 4. Without the sum: 16.
  """
  inputs = linear_attention.Inputs(
    query=by_hand.one_head([2, 5], [2, 1]),
    key=by_hand.one_head([1, -3], [0, 2]),
    value=by_hand.one_head([6], [5]),
    log_decay=jnp.log(by_hand.one_head([0.3], [0.5])),
  )
  for normalize, expected in ((True, [4, 4]), (False, [12, 16])):
    spec = linear_attention.Spec(
      feature_map="relu",
      normalize=normalize,
      forget_gate=True,
      scale=1.0,
      eps=1.0,
    )
    state = fresh(spec, batch=1, heads=1, key_dim=2, value_dim=1)
    state, y = function(state, inputs, spec=spec)
    np.testing.assert_allclose(y[0, :, 0, 0], expected, rtol=1e-14)
    np.testing.assert_allclose(state.memory[0, 0, :, 0], [3, 10], rtol=1e-14)
    if normalize:
      np.testing.assert_allclose(state.normalizer[0, 0], [0.5, 2], rtol=1e-14)


@pytest.mark.parametrize("name", reference.NOT_NEGATIVE)
def test_read_is_a_mean_of_values(name):
  """The parallel form: attention with weights phi(q) . phi(k) (eq. 9)."""
  spec = linear_attention.Spec(feature_map=name, eps=1e-15)
  inputs = inputs_for(spec)
  phi = reference.FEATURE_MAPS[name]
  weights = jnp.einsum("bthk,bihk->bhti", phi(inputs.query), phi(inputs.key))
  weights = jnp.tril(weights)
  weights = weights / weights.sum(-1, keepdims=True)
  expected = jnp.einsum("bhti,bihv->bthv", weights, inputs.value)
  _, y = COMPILED.reference(fresh(spec), inputs, spec=spec)
  keep = np.isfinite(expected)  # relu may leave a first token no weight
  np.testing.assert_allclose(y[keep], expected[keep], rtol=1e-9, atol=1e-11)


def test_feature_maps_by_hand():
  x = jnp.array([-jnp.log(2.0), 0.0, 3.0])
  maps = reference.FEATURE_MAPS
  np.testing.assert_allclose(maps["elu"](x), [0.5, 1, 4])
  np.testing.assert_allclose(maps["relu"](x), [0, 0, 3])
  np.testing.assert_array_equal(maps["identity"](x), x)
  np.testing.assert_allclose(maps["softmax"](x).sum(), 1)
  for name in reference.NOT_NEGATIVE:
    assert jnp.all(maps[name](x) >= 0)


def test_decay_of_retention():
  """A constant decay: y_t = sum_i gamma^(t-i) (q_t . k_i) v_i."""
  spec = linear_attention.Spec(
    feature_map="identity", normalize=False, forget_gate=True, scale=1.0
  )
  inputs = inputs_for(spec)
  inputs = inputs._replace(log_decay=jnp.log(0.9) + 0 * inputs.log_decay)
  scores = jnp.einsum("bthk,bihk->bhti", inputs.query, inputs.key)
  t = jnp.arange(12)
  scores = scores * jnp.tril(0.9 ** (t[:, None] - t))
  expected = jnp.einsum("bhti,bihv->bthv", scores, inputs.value)
  for function in (COMPILED.reference, COMPILED.chunk):
    _, y = function(fresh(spec), inputs, spec=spec)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
  ("field", "fields"),
  [
    ("feature_map", {"feature_map": "tanh"}),
    ("normalize", {"feature_map": "identity"}),
    ("scale", {"scale": 0.0}),
    ("eps", {"eps": 0.0}),
  ],
)
def test_spec_names_the_field_out_of_range(field, fields):
  with pytest.raises(ValueError, match=f"{field}="):
    linear_attention.Spec(**fields)


def test_chunk_names_what_does_not_fit():
  spec = linear_attention.Spec(forget_gate=True)
  inputs, state = inputs_for(spec), fresh(spec)
  for name in inputs._fields:
    wrong = inputs._replace(**{name: jnp.zeros((2, 12, 2, 9))})
    with pytest.raises(ValueError, match=rf"{name} has shape .* expected"):
      linear_attention.chunk(state, wrong, spec=spec)
  with pytest.raises(
    ValueError, match="log_decay is given, but forget_gate=False"
  ):
    linear_attention.chunk(state, inputs, spec=linear_attention.Spec())
  with pytest.raises(ValueError, match=r"state\.normalizer is given, but norm"):
    linear_attention.chunk(
      state, inputs, spec=linear_attention.Spec(normalize=False)
    )
  with pytest.raises(ValueError, match="tile_time="):
    form.Tiling(tile_time=0)
