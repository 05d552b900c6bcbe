"""Level 1: the reference is Mamba2's state space model."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from memcomp_kernels import linear_attention, state_space_duality
from memcomp_kernels.chunking import form
from memcomp_kernels.testing import memories

COMPILED = programs.of(state_space_duality)
MEMORY = memories.MEMORIES["state_space_duality"]
SIZES = {"batch": 2, "heads": 4, "key_dim": 6, "value_dim": 5}
OWN, SHARED = (
  state_space_duality.Spec(),
  state_space_duality.Spec(heads_per_group=2),
)


pytestmark = pytest.mark.usefixtures("float64")


def inputs_for(spec=SHARED, time=12):
  return MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)


def fresh(spec=SHARED, **sizes):
  return state_space_duality.init_state(
    spec, **(SIZES | sizes), dtype=jnp.float64
  )


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_by_hand(function):
  """Two tokens, a state of two, D = 10.

  Token 1: B = (1, 2), x = 3, dt = 1/3: h = (1, 2). C = (1, 1): 3 + 30 = 33.
  Token 2: exp(dt A) = 1/2: h = (1/2, 1). B = (4, 0), x = 1/2, dt = 1: h =
    (5/2, 1). C = (2, 3): 5 + 3 + 5 = 13.
  """
  inputs = state_space_duality.Inputs(
    query=by_hand.one_head([1, 1], [2, 3]),
    key=by_hand.one_head([1, 2], [4, 0]),
    value=by_hand.one_head([3], [0.5]),
    log_decay=jnp.log(by_hand.one_head([0.3], [0.5])),
    write_rate=by_hand.one_head([1 / 3], [1.0]),
    skip=by_hand.one_head([10], [10]),
  )
  state = fresh(OWN, batch=1, heads=1, key_dim=2, value_dim=1)
  state, y = function(state, inputs, spec=OWN)
  np.testing.assert_allclose(y[0, :, 0, 0], [33, 13], rtol=1e-14)
  np.testing.assert_allclose(state.memory[0, 0, :, 0], [2.5, 1], rtol=1e-14)


def test_the_quadratic_form():
  """Section 3.2: Y = (L * (C B^T)) diag(dt) X, L_{ti} = prod a_j, i < j <= t."""
  inputs = inputs_for(OWN)
  inputs = inputs._replace(skip=0 * inputs.skip)
  L = np.zeros((2, 4, 12, 12))
  a = np.exp(inputs.log_decay[..., 0])
  for t in range(12):
    for i in range(t + 1):
      L[:, :, t, i] = np.prod(a[:, i + 1 : t + 1], axis=1)
  scores = L * jnp.einsum("bthn,bihn->bhti", inputs.query, inputs.key)
  expected = jnp.einsum(
    "bhti,bihp->bthp", scores, inputs.write_rate * inputs.value
  )
  for function in (COMPILED.reference, COMPILED.chunk):
    _, y = function(fresh(OWN), inputs, spec=OWN)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)


def test_duality_with_linear_attention():
  spec = state_space_duality.Spec(skip=False)
  inputs = inputs_for(spec)
  _, y = COMPILED.reference(fresh(spec), inputs, spec=spec)
  other = linear_attention.Spec(
    feature_map="identity", normalize=False, forget_gate=True, scale=1.0
  )
  _, expected = linear_attention.reference(
    linear_attention.init_state(other, **SIZES, dtype=jnp.float64),
    linear_attention.Inputs(
      inputs.query,
      inputs.key,
      inputs.write_rate * inputs.value,
      inputs.log_decay,
    ),
    spec=other,
  )
  np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", [COMPILED.reference, COMPILED.chunk])
def test_groups_are_heads_that_follow_each_other(function):
  inputs = inputs_for()
  assert inputs.query.shape[2] == 2
  heads = jnp.array([0, 0, 1, 1])
  repeated = inputs._replace(
    query=inputs.query[:, :, heads], key=inputs.key[:, :, heads]
  )
  for got, expected in zip(
    jax.tree.leaves(function(fresh(), inputs, spec=SHARED)),
    jax.tree.leaves(function(fresh(OWN), repeated, spec=OWN)),
    strict=True,
  ):
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_bad_values_are_named():
  with pytest.raises(ValueError, match="heads_per_group=0"):
    state_space_duality.Spec(heads_per_group=0)
  with pytest.raises(ValueError, match="heads_per_group=3 must divide heads=4"):
    fresh(state_space_duality.Spec(heads_per_group=3))
  with pytest.raises(ValueError, match="tile_time="):
    form.Tiling(tile_time=0)


def test_chunk_names_what_does_not_fit():
  inputs, state = inputs_for(), fresh()
  for name in inputs._fields:
    wrong = inputs._replace(**{name: jnp.zeros((2, 12, 4, 9))})
    with pytest.raises(ValueError, match=rf"{name} has shape .* expected"):
      state_space_duality.chunk(state, wrong, spec=SHARED)
  with pytest.raises(
    ValueError, match="skip is missing, but skip=True needs it"
  ):
    state_space_duality.chunk(state, inputs._replace(skip=None), spec=SHARED)
  with pytest.raises(ValueError, match=r"query has shape .* expected"):
    state_space_duality.chunk(state, inputs, spec=OWN)
