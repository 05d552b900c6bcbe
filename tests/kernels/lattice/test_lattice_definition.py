"""Level 1: the reference is the paper's Lattice."""

import dataclasses
import itertools

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lattice_by_hand import (
  COMPILED,
  MEMORY,
  SIZES,
  inputs_for,
  run,
  state_of,
  two_slots,
)

from memcomp_kernels import lattice
from memcomp_kernels.lattice import reference

DELTA = lattice.Spec(
  num_slots=6, update="delta", forget_gate=False, gradient_at="token"
)


pytestmark = pytest.mark.usefixtures("float64")


def difference(a, b):
  return jnp.linalg.norm(a - b) / jnp.linalg.norm(a)


# Numbers on paper.


def test_two_tokens_by_hand():
  spec = two_slots()
  inputs = lattice.Inputs(
    query=by_hand.one_head([1, 5], [2, 0.5]),
    key=by_hand.one_head([2, 1], [0, 1]),
    value=by_hand.one_head([1, 1], [0.2, 1.4]),
    log_decay=jnp.log(by_hand.one_head([1.0], [0.3])),
    write_rate=by_hand.one_head([0.75], [0.4]),
  )
  state, y = COMPILED.reference(
    state_of(spec, [1, 0], [0, 1]), inputs, spec=spec
  )
  # Token 1: h = S k - v = [1, 0] lies along s_1, which stays; s_2 is written
  #          [-.75, 1], of norm 1.25: s_2 = [-.6, .8]; y = s_1 + 5 s_2.
  # Token 2: h = s_2 - v = [-.8, -.6] is tangent at s_2; s_1 has c = 0 and is
  #          only scaled. s_2 is .3 [-.6, .8] + .4 [.8, .6] = [.14, .48], of
  #          norm .5: s_2 = [.28, .96]; y = 2 s_1 + s_2 / 2.
  np.testing.assert_allclose(
    state.memory[0, 0], [[1, 0.28], [0, 0.96]], atol=1e-15
  )
  np.testing.assert_allclose(y[0, :, 0], [[-2, 4], [2.14, 0.48]], atol=1e-14)


@pytest.mark.parametrize(
  ("objective", "first", "second"),
  [
    # h = [1, 0], c = [2, 1]: along s_1; s_2 - .75 h
    ("decoding", [1, 0], [-0.6, 0.8]),
    # h = [1, 1], c = S^T v - k = [-1, 0]: s_1 + .75 P h
    ("encoding", [0.8, 0.6], [0, 1]),
    # h = -[1, 1], c = [2, 1]: s_1 + 1.5 [0, 1] and s_2 + .75 [1, 0]
    ("similarity", np.array([2, 3]) / np.sqrt(13), [0.6, 0.8]),
  ],
)
def test_one_token_of_each_objective_by_hand(objective, first, second):
  spec = two_slots(objective=objective)
  ones = by_hand.one_head([1.0])
  inputs = lattice.Inputs(
    by_hand.one_head([1, 1]),
    by_hand.one_head([2, 1]),
    by_hand.one_head([1, 1]),
    0 * ones,
    0.75 * ones,
  )
  state, _ = COMPILED.reference(
    state_of(spec, [1, 0], [0, 1]), inputs, spec=spec
  )
  np.testing.assert_allclose(
    state.memory[0, 0], np.stack([first, second], axis=1), atol=1e-15
  )


@pytest.mark.parametrize(
  ("update", "expected"),
  [
    # The loss on S: h = S k - v = [3, 0], S - .5 h k^T.
    ("delta", [[-1, -1.5], [0, 1]]),
    # The loss on Phi = I: h = [1, 0] lies along s_1; s_2 - .5 h.
    ("orthogonal", [[2, -0.5], [0, 1]]),
  ],
)
def test_columns_that_are_no_units_by_hand(update, expected):
  spec = two_slots(update=update)
  ones = by_hand.one_head([1.0])
  inputs = lattice.Inputs(
    by_hand.one_head([1, 1]),
    by_hand.one_head([2, 1]),
    by_hand.one_head([1, 1]),
    0 * ones,
    0.5 * ones,
  )
  state, _ = COMPILED.reference(
    state_of(spec, [2, 0], [0, 1]), inputs, spec=spec
  )
  np.testing.assert_allclose(state.memory[0, 0], expected, atol=1e-15)


def test_chunk_start_gradient_by_hand():
  """Two tokens of one chunk write what each would write to its start."""
  spec = two_slots(gradient_at="chunk_start", chunk_size=2)
  inputs = lattice.Inputs(
    query=by_hand.one_head([0, 1], [0, 1]),
    key=by_hand.one_head([0, 1], [0, 1]),
    value=by_hand.one_head([-1, 1], [-1, 1]),
    log_decay=by_hand.one_head([0.0], [0.0]),
    write_rate=by_hand.one_head([0.75], [0.75]),
  )
  state, y = COMPILED.reference(
    state_of(spec, [1, 0], [0, 1]), inputs, spec=spec
  )
  # h = [0, 1] - v = [1, 0] twice: ds = [-.75, 0], beta = .8. The second write
  # is added to [-.6, .8] and contracted, and is read before the chunk's end
  # makes it a unit.
  np.testing.assert_allclose(
    y[0, :, 0], [[-0.6, 0.8], [-1.08, 0.64]], rtol=1e-12
  )
  np.testing.assert_allclose(
    state.memory[0, 0, :, 1], np.array([-1.08, 0.64]) / np.sqrt(1.576)
  )
  assert int(state.position[0]) == 0


@pytest.mark.parametrize(
  ("fields", "mu", "second"),
  [
    ({"update": "orthogonal", "forget_gate": False}, 0.8, [-0.5, 0.75]),
    ({"update": "orthogonal"}, 0.8, [-0.5, 0.55]),
    ({"forget_gate": False}, 0.8, np.array([-2, 3]) / np.sqrt(13)),
    ({}, 0.8, np.array([-10, 11]) / np.sqrt(221)),
  ],
  ids=["alone", "forget gate", "normalized", "both"],
)
def test_soft_threshold_by_hand(fields, mu, second):
  """s_2 is written [-.75, mu]; .75 / 3 is taken off every entry."""
  spec = two_slots(sparsity=1 / 3, **fields)
  ones = by_hand.one_head([1.0])
  inputs = lattice.Inputs(
    by_hand.one_head([1, 1]),
    by_hand.one_head([2, 1]),
    by_hand.one_head([1, 1]),
    jnp.log(mu * ones),
    0.75 * ones,
  )
  state, _ = COMPILED.reference(
    state_of(spec, [1, 0], [0, 1]), inputs, spec=spec
  )
  np.testing.assert_allclose(state.memory[0, 0, :, 1], second, rtol=1e-12)


def test_threshold_of_a_chunk_is_that_of_its_rates():
  """A chunk of two, rates .75 and .25: 1/3 is taken off at its end only."""
  spec = two_slots(
    update="orthogonal",
    gradient_at="chunk_start",
    chunk_size=2,
    sparsity=1 / 3,
  )
  zero = by_hand.one_head([0.0, 0.0], [0.0, 0.0])
  inputs = lattice.Inputs(
    query=by_hand.one_head([0, 1], [0, 1]),
    key=zero,
    value=zero,
    log_decay=zero[..., :1],
    write_rate=by_hand.one_head([0.75], [0.25]),
  )
  state, y = COMPILED.reference(
    state_of(spec, [1, 0], [0, 1]), inputs, spec=spec
  )
  np.testing.assert_allclose(y[0, :, 0], [[0, 1], [0, 1]])
  np.testing.assert_allclose(state.memory[0, 0], np.eye(2) * 2 / 3)


def test_a_column_that_would_be_wiped_out_keeps_its_value():
  S = jnp.array([[0.1, 1.0, 0.0], [-0.05, 0.2, 0.0]])
  np.testing.assert_allclose(
    reference.soft_threshold(S, jnp.array(0.25)),
    [[0.1, 0.75, 0], [-0.05, 0, 0]],
  )
  spec = dataclasses.replace(DELTA, update="normalized", sparsity=100.0)
  final, y = run(spec, inputs_for(spec))
  np.testing.assert_allclose(jnp.linalg.norm(final.memory, axis=-2), 1.0)
  assert jnp.all(jnp.isfinite(y))


# Closed forms.


def loss(objective, Phi, k, v):
  """Equations 6, 9 and 11 for one head."""
  if objective == "decoding":
    return jnp.sum((Phi @ k - v) ** 2)
  if objective == "encoding":
    return jnp.sum((Phi.T @ v - k) ** 2)
  return -jnp.dot(Phi.T @ v, k)


# Of the gradient of the stated loss; absorbed in gamma.
FACTORS = {"decoding": 2, "encoding": 2, "similarity": 1}


def random_head(seed=0, unit=False):
  keys = jax.random.split(jax.random.key(seed), 3)
  S = jax.random.normal(keys[0], (5, 4))
  if unit:
    S = S / jnp.linalg.norm(S, axis=0)
  k, v = jax.random.normal(keys[1], (4,)), jax.random.normal(keys[2], (5,))
  return S, k, v


def closed_form(spec, S, k, v):
  # An axis each for batch and heads.
  wide = (x[None, None] for x in (S, k, v))
  return reference.gradient(*wide, spec)[0, 0]


@pytest.mark.parametrize("objective", reference.OBJECTIVES)
def test_loss_factors_are_the_gradient_at_phi(objective):
  Phi, k, v = random_head()
  h, c = reference.loss_factors(
    objective, Phi[None, None], k[None, None], v[None, None]
  )
  expected = jax.grad(lambda Phi: loss(objective, Phi, k, v))(Phi)
  np.testing.assert_allclose(
    FACTORS[objective] * jnp.outer(h[0, 0], c[0, 0]), expected, rtol=1e-12
  )
  delta = dataclasses.replace(DELTA, objective=objective)
  np.testing.assert_allclose(
    FACTORS[objective] * closed_form(delta, Phi, k, v), expected, rtol=1e-12
  )


@pytest.mark.parametrize("objective", reference.OBJECTIVES)
@pytest.mark.parametrize("update", ["orthogonal", "normalized"])
def test_gradient_is_that_of_the_loss_through_phi(objective, update):
  """Equations 7, 10 and 12: through columns over their norms."""
  spec = dataclasses.replace(DELTA, objective=objective, update=update)
  S, k, v = random_head(unit=update == "normalized")

  def through_phi(S):
    return loss(objective, S / jnp.linalg.norm(S, axis=0), k, v)

  gradient = closed_form(spec, S, k, v)
  np.testing.assert_allclose(
    FACTORS[objective] * gradient, jax.grad(through_phi)(S), atol=1e-13
  )
  along = jnp.sum(S * gradient, axis=0)
  np.testing.assert_allclose(along, 0, atol=1e-13)


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_beta_is_renormalisation(mu):
  """Equation 14: for unit columns and writes along their tangents."""
  S, k, v = random_head(unit=True)
  spec = dataclasses.replace(DELTA, update="normalized")
  ds = -0.7 * closed_form(spec, S, k, v)
  beta = reference.contraction(jnp.array(mu), reference.squared_norms(ds))
  written = mu * S + ds
  np.testing.assert_allclose(
    beta * written, written / jnp.linalg.norm(written, axis=0), rtol=1e-12
  )
  # Neither holds for a write with a share along the column.
  written = written + 0.1 * S
  assert jnp.all(jnp.abs(jnp.linalg.norm(beta * written, axis=0) - 1) > 1e-3)


# The paper's ladder.


def test_delta_is_deltanet():
  """S <- S - gamma (S k - v) k^T, as a plain numpy loop."""
  inputs = inputs_for(DELTA)
  state = MEMORY.make_state(jax.random.key(1), DELTA, **SIZES)
  final, y = COMPILED.reference(state, inputs, spec=DELTA)
  q, k, v, _, gamma = (np.array(x) for x in inputs)
  for b in range(2):
    for head in range(2):
      S = np.array(state.memory[b, head])
      for t in range(12):
        at = b, t, head
        S = S - gamma[at] * np.outer(S @ k[at] - v[at], k[at])
        np.testing.assert_allclose(y[at], S @ q[at], atol=1e-13)
      np.testing.assert_allclose(final.memory[b, head], S, atol=1e-13)


def test_every_rung_is_one_field():
  orthogonal = dataclasses.replace(DELTA, update="orthogonal")
  normalized = dataclasses.replace(DELTA, update="normalized")
  gated = dataclasses.replace(normalized, forget_gate=True)
  # From the same unit columns, so that only the update tells them apart.
  inputs = inputs_for(DELTA)
  memory = MEMORY.make_state(jax.random.key(1), normalized, **SIZES).memory
  results = []
  for spec in (DELTA, orthogonal, normalized, gated):
    state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)
    state = state._replace(memory=memory)
    results.append(COMPILED.reference(state, inputs, spec=spec)[1])
  for lower, upper in itertools.pairwise(results):
    assert difference(lower, upper) > 0.01


def test_forget_gate_off_ignores_the_decay():
  for gradient_at in reference.GRADIENT_AT:
    spec = lattice.Spec(num_slots=6, forget_gate=False, gradient_at=gradient_at)
    inputs = inputs_for(spec)
    other = inputs._replace(log_decay=5 * inputs.log_decay)
    for function in (COMPILED.reference, COMPILED.chunk):
      state = MEMORY.make_state(jax.random.key(1), spec, **SIZES)
      np.testing.assert_array_equal(
        function(state, inputs, spec=spec)[1],
        function(state, other, spec=spec)[1],
      )


def test_decay_alone_does_not_move_unit_columns():
  """mu only weighs the old direction against the new."""
  spec = dataclasses.replace(DELTA, update="normalized", forget_gate=True)
  inputs = inputs_for(spec)
  inputs = inputs._replace(write_rate=0 * inputs.write_rate)
  final, _ = run(spec, inputs)
  before = MEMORY.make_state(jax.random.key(1), spec, **SIZES).memory
  np.testing.assert_allclose(final.memory, before, rtol=1e-13)


def test_chunk_of_one_is_per_token():
  token = lattice.Spec(num_slots=6, gradient_at="token")
  one = lattice.Spec(num_slots=6, chunk_size=1)
  inputs = inputs_for(token)
  np.testing.assert_array_equal(run(token, inputs)[1], run(one, inputs)[1])


def test_chunk_size_is_meaning():
  inputs = inputs_for(DELTA)
  exact = run(lattice.Spec(num_slots=6, gradient_at="token"), inputs)
  stale = run(lattice.Spec(num_slots=6, chunk_size=4), inputs)
  assert difference(exact[1], stale[1]) > 0.01
