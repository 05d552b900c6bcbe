"""Lattice with gradients per token, in tiles: every solver is the reference."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import lattice
from memcomp_kernels.lattice import reference, tilings
from memcomp_kernels.lattice import tile as lattice_tile
from memcomp_kernels.lattice.per_token import substitution, sweeps, writes
from memcomp_kernels.testing import (
  checks,
  errors,
  gradients,
  memories,
  packed_checks,
  subjects,
  tolerances,
)

MEMORY = memories.MEMORIES["lattice"]
SOLVERS = tuple(
  tilings.Tiling(tile_time=8, solver=solver) for solver in tilings.SOLVERS
)
each_solver = pytest.mark.parametrize(
  "tiling", SOLVERS, ids=lambda tiling: tiling.solver
)
# The contract's checks take substitution.
sweeps_at_least = pytest.mark.parametrize(
  "tiling",
  rotation.cases(SOLVERS, SOLVERS[1:]),
  ids=lambda tiling: tiling.solver,
)


@dataclasses.dataclass(frozen=True)
class Subject(subjects.Subject):
  tiling: tilings.Tiling = SOLVERS[0]

  def chunk(self, state, inputs, segment_ids=None, reset_state=None):
    return programs.direct(lattice_tile.chunk)(
      state,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=reset_state,
      tiling=self.tiling,
    )[:2]


def subject(tiling=SOLVERS[0], **fields):
  spec = lattice.Spec(num_slots=6, gradient_at="token", **fields)
  return Subject(MEMORY, spec, "xla_chunked", tiling=tiling)


def assert_exact(several, state, inputs, what=""):
  """Values and gradients of each are the reference's."""
  with jax.enable_x64(True):
    state, inputs = gradients.cast((state, inputs), jnp.float64)
    expected = gradients.value_and_gradients(
      several[0].reference, (state, inputs)
    )
    for one in several:
      found = gradients.value_and_gradients(one.chunk, (state, inputs))
      subjects.assert_agree(found, expected, f"{one.tiling} {what}")


def drawn(one, time):
  with jax.enable_x64(True):
    return one.state(), one.inputs(time)


# Those that the contract suite does not meet.
@pytest.mark.slow
@pytest.mark.parametrize(
  ("objective", "update"),
  [
    pytest.param(
      *pair, marks=[pytest.mark.slow] * (pair != ("similarity", "orthogonal"))
    )
    for pair in itertools.product(reference.OBJECTIVES, reference.UPDATES)
    if pair
    not in (
      ("decoding", "normalized"),
      ("encoding", "orthogonal"),
      ("similarity", "delta"),
    )
  ],
)
def test_every_objective_and_update(objective, update):
  subjects = [
    subject(tiling, objective=objective, update=update) for tiling in SOLVERS
  ]
  assert_exact(subjects, *drawn(subjects[0], 19))


@pytest.mark.slow
@pytest.mark.parametrize("time", [1, 37])
def test_every_tile_size(time):
  subjects = [
    subject(tilings.Tiling(tile_time=tile, solver=solver))
    for tile, solver in [
      (1, "substitution"),
      (64, "substitution"),
      (16, "sweeps"),
    ]
  ]
  assert_exact(subjects, *drawn(subjects[0], time))


def cases_of(inputs):
  same = jnp.arange(inputs.key.shape[1]) % 3
  return MEMORY.edges(inputs) | {
    "large rates": inputs._replace(write_rate=30 * inputs.write_rate),
    "repeated tokens": inputs._replace(
      key=inputs.key[:, same], value=inputs.value[:, same]
    ),
    "forgets all at one token": inputs._replace(
      log_decay=inputs.log_decay.at[:, 5].set(-1e4)
    ),
  }


def joined(tree, rows):
  """All in one: where nothing is kept, no rate has a gradient but rounding."""
  return jnp.concatenate(
    [
      x[rows].ravel()
      for x in jax.tree.leaves(tree)
      if x.ndim and jnp.issubdtype(x.dtype, jnp.floating)
    ]
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("objective", "update"),
  [("decoding", "normalized"), ("encoding", "orthogonal")],
)
def test_edges(objective, update):
  subjects = [
    subject(tiling, objective=objective, update=update) for tiling in SOLVERS
  ]
  state, inputs = drawn(subjects[0], 21)
  with jax.enable_x64(True):
    cases = cases_of(inputs)
  # One compilation for all: each case is a pair of rows.
  with jax.enable_x64(True):
    stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *cases.values())
    state = jax.tree.map(lambda x: jnp.concatenate([x] * len(cases)), state)
    expected = gradients.value_and_gradients(
      subjects[0].reference, (state, stacked)
    )
    for one in subjects:
      found = gradients.value_and_gradients(one.chunk, (state, stacked))
      for i, name in enumerate(cases):
        rows = slice(2 * i, 2 * i + 2)
        for part, bound in enumerate((1e-12, 1e-10)):
          errors.assert_close(
            joined(found[part], rows),
            joined(expected[part], rows),
            bound,
            f"{one.tiling.solver}, {name}, {part}",
          )


@pytest.mark.slow
@sweeps_at_least
def test_columns_without_a_direction(tiling):
  """A zero column stays until it is written; a long one is normalised."""
  one = subject(tiling)
  state, inputs = drawn(one, 11)
  with jax.enable_x64(True):
    memory = state.memory.at[..., 0].set(0).at[..., 1].multiply(3)
  assert_exact([one], state._replace(memory=memory), inputs)


# Of these two the contract suite meets substitution.


@pytest.mark.slow
def test_float32():
  checks.check_precision(subject(SOLVERS[1]), "float32", 64)


@pytest.mark.slow  # The contract says it of these solvers' default.
def test_packed():
  rows = np.zeros((3, 24), np.int32)
  rows[0] = 1  # continues the state's segment
  rows[1, 2:9], rows[1, 13:] = 1, 2  # padding inside
  rows[2] = np.repeat([3, 5, 2], 8)
  packed_checks.check_packed_against_reference(subject(SOLVERS[1]), rows)


def tile(one, time):
  """A first memory and the tokens of one tile."""
  state, inputs = drawn(one, time)
  with jax.enable_x64(True):
    query, key, value, log_decay, rate = (jnp.moveaxis(x, 1, 2) for x in inputs)
    mu = jnp.exp(log_decay)
    taken = jnp.ones_like(rate)
    return state.memory, writes.TokenInputs(query, key, value, mu, rate, taken)


@pytest.mark.slow
@each_solver
@pytest.mark.parametrize("objective", reference.OBJECTIVES)
def test_a_row_that_overflows_spoils_none_before_it(tiling, objective):
  one = subject(tiling, objective=objective, update="delta")
  memory, tokens = tile(one, 8)
  with jax.enable_x64(True):
    huge = jnp.where(jnp.arange(8) < 5, 1.0, 1e200)[:, None]
    large = tokens._replace(key=tokens.key * huge, value=tokens.value * huge)

    def solve(tokens):
      if tiling.solver == "sweeps":
        return sweeps.solve(one.spec, tiling, memory, tokens)[0]
      return substitution.solve(one.spec, memory, tokens)

    found, expected = jax.jit(solve)(large), jax.jit(solve)(tokens)
  for name in ("h", "from_start", "scores"):
    errors.assert_close(
      getattr(found, name)[:, :, :5, :5],
      getattr(expected, name)[:, :, :5, :5],
      tolerances.VALUE["float64"],
      name,
    )


def test_a_row_that_overflows_on_the_way():
  """Row 2 is exp(1000) until row 1 is right, and meets a zero in row 1."""

  def function(x):
    strict = jnp.array([[0, 0, 0], [1, 0, 0], [0, 0, 0]], jnp.float32)
    new = strict @ x[0, 0] + jnp.array([[1.0], [1.0], [0.0]])
    last = jnp.exp(500 * (2 - x[0, 0, 1]))
    return new.at[2].set(last)[None, None]

  x, residual, _ = sweeps.fixed_point(
    function, jnp.zeros((1, 1, 3, 1)), 1e-6, 4
  )
  assert residual <= 1e-6
  np.testing.assert_array_equal(x[0, 0, :, 0], [1, 2, 1])


def nan_like(function):
  return lambda *arguments: jax.tree.map(
    lambda x: x * jnp.nan, function(*arguments)
  )


@pytest.mark.slow
def test_sweeps_fall_back(monkeypatch):
  one = subject(SOLVERS[1])
  state, inputs = drawn(one, 16)
  with monkeypatch.context() as patch:
    # They converge by themselves, forward and backward, ...
    patch.setattr(substitution, "solve", nan_like(substitution.solve))
    assert_exact([one], state, inputs)
    # ... and where they may not, substitution it is.
    patch.setattr(sweeps, "tolerance_of", lambda *_: -1.0)
    with pytest.raises(AssertionError, match="nan"), jax.enable_x64(True):
      errors.assert_finite(one.chunk(state, inputs)[1], "nan")
  monkeypatch.setattr(sweeps, "tolerance_of", lambda *_: -1.0)
  assert_exact([one], state, inputs)


# The tests bite.


@pytest.mark.slow
@sweeps_at_least
def test_norms_without_a_derivative(monkeypatch, tiling):
  right = writes.before_tile

  def wrong(S):
    return jax.lax.stop_gradient(right(S))

  monkeypatch.setattr(writes, "before_tile", wrong)
  one = subject(tiling)
  with pytest.raises(AssertionError, match="gradients: over 1e-10"):
    assert_exact([one], *drawn(one, 19))


@pytest.mark.slow
def test_empty_places_that_count(monkeypatch):
  right = writes.factors

  def wrong(share, length, before, token, spec):
    token = token._replace(taken=jnp.ones_like(token.taken))
    return right(share, length, before, token, spec)

  monkeypatch.setattr(writes, "factors", wrong)
  one = subject()
  rows = np.ones((2, 24), np.int32)
  rows[1] = 0  # its derivative is not that of a renormalised memory
  with pytest.raises(AssertionError, match="over 1e-1"):
    packed_checks.check_packed_against_reference(one, rows)


def test_tilings_name_the_field_out_of_range():
  for field, value in (
    ("tile_time", 0),
    ("solver", "guess"),
    ("tolerance", -1.0),
  ):
    with pytest.raises(ValueError, match=f"{field}="):
      tilings.Tiling(**{field: value})
