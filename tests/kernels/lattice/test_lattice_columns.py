"""Level 1: Lattice's columns over time, what it starts from, and its errors."""

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation
from lattice_by_hand import (
  MEMORY,
  SIZES,
  inputs_for,
  run,
  state_of,
  two_slots,
)

from memcomp_kernels import lattice
from memcomp_kernels.lattice import orthonormal_slots, reference

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.slow
@pytest.mark.parametrize("gradient_at", reference.GRADIENT_AT)
def test_columns_stay_units_over_many_tokens(gradient_at):
  """65,536 tokens in float32."""
  time, spec = 65_536, lattice.Spec(num_slots=4, gradient_at=gradient_at)
  with jax.enable_x64(False):
    sizes = {"batch": 1, "heads": 1, "value_dim": 8}
    inputs = inputs_for(spec, time=time, **sizes)
    # Each token reads one column.
    one_hot = jnp.eye(4)[jnp.arange(time) % 4]
    inputs = inputs._replace(query=one_hot[None, :, None])
    state, y = jax.jit(
      lambda inputs: lattice.chunk(
        lattice.init_state(spec, batch=1, heads=1, value_dim=8),
        inputs,
        spec=spec,
      )
    )(inputs)
  assert state.memory.dtype == jnp.float32
  norms = np.linalg.norm(np.array(state.memory, np.float64), axis=-2)
  np.testing.assert_allclose(norms, 1, atol=1e-6)
  read = np.linalg.norm(np.array(y, np.float64), axis=-1)[0, :, 0]
  if gradient_at == "token":
    # Inside a tile columns are followed by their factors, and where h lies
    # along a column |h|^2 - r^2 cancels; each tile's end renormalises them.
    np.testing.assert_allclose(read, 1, atol=2e-4)
    assert np.quantile(np.abs(read - 1), 0.8) < 1e-6
  else:  # beta keeps column r of a chunk below sqrt(r), docs/lattice.md's bound
    read = read.reshape(-1, spec.chunk_size)
    bound = np.sqrt(np.arange(1, spec.chunk_size + 1)) + 1e-6
    assert np.all(read <= bound) and np.any(read > 1.5)


@pytest.mark.parametrize(
  "gradient_at", rotation.cases(reference.GRADIENT_AT, ["token"])
)
def test_more_slots_than_value_dims(gradient_at):
  spec = lattice.Spec(num_slots=9, gradient_at=gradient_at, chunk_size=4)
  inputs = inputs_for(spec, value_dim=3)
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES | {"value_dim": 3})
  final, y = programs.compiled(lattice.chunk)(state, inputs, spec=spec)
  assert final.memory.shape == (2, 2, 3, 9) and y.shape == (2, 12, 2, 3)
  np.testing.assert_allclose(
    jnp.linalg.norm(final.memory, axis=-2), 1, rtol=1e-12
  )
  np.testing.assert_allclose(y, run(spec, inputs, value_dim=3)[1], rtol=1e-10)


def test_first_columns_are_orthonormal():
  slots = orthonormal_slots(
    jax.random.key(0), heads=3, value_dim=7, num_slots=4, dtype=jnp.float64
  )
  gram = jnp.einsum("hdm,hdn->hmn", slots, slots)
  np.testing.assert_allclose(gram, jnp.stack([jnp.eye(4)] * 3), atol=1e-14)
  assert jnp.all(jnp.abs(slots[0] - slots[1]) > 1e-6)
  state = lattice.init_state(
    lattice.Spec(num_slots=4), batch=2, heads=3, value_dim=7
  )
  gram = jnp.einsum("bhdm,bhdn->bhmn", state.memory, state.memory)
  np.testing.assert_allclose(gram, jnp.zeros_like(gram) + jnp.eye(4), atol=1e-6)


def test_a_given_memory_is_normalised_where_the_update_is():
  for update in reference.UPDATES:
    state = state_of(two_slots(update=update), [3.0, 0.0], [4.0, 0.0])
    unit = update == "normalized"
    expected = [[0.6, 0], [0.8, 0]] if unit else [[3, 0], [4, 0]]
    np.testing.assert_allclose(state.memory[0, 0], expected)


def test_a_zero_column_is_a_unit_once_written():
  spec = two_slots(objective="similarity")
  ones = by_hand.one_head([1.0])
  inputs = lattice.Inputs(
    by_hand.one_head([1, 1]),
    by_hand.one_head([1, 1]),
    by_hand.one_head([3, 4]),
    0 * ones,
    ones,
  )
  state, _ = lattice.reference(
    state_of(spec, [1, 0], [0, 0]), inputs, spec=spec
  )
  np.testing.assert_allclose(state.memory[0, 0, :, 1], [0.6, 0.8])


# Errors.


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("num_slots", 0),
    ("objective", "encode"),
    ("update", "unit"),
    ("sparsity", -0.1),
    ("sparsity", float("nan")),
    ("gradient_at", "chunk"),
    ("chunk_size", 0),
  ],
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    lattice.Spec(**{field: value})


def test_more_orthonormal_slots_than_dimensions_are_refused():
  for make in (
    lambda: orthonormal_slots(
      jax.random.key(0), heads=1, value_dim=4, num_slots=5
    ),
    lambda: lattice.init_state(
      lattice.Spec(num_slots=5), batch=1, heads=1, value_dim=4
    ),
  ):
    with pytest.raises(ValueError, match="num_slots=5 must be at most"):
      make()
  with pytest.raises(ValueError, match="at least float32"):
    lattice.init_state(
      lattice.Spec(num_slots=2),
      batch=1,
      heads=1,
      value_dim=4,
      dtype=jnp.bfloat16,
    )


def test_chunk_names_what_does_not_fit():
  spec = lattice.Spec(num_slots=6)
  inputs = inputs_for(spec)
  state = lattice.init_state(spec, batch=2, heads=2, value_dim=7)

  def refused(message, inputs=inputs, spec=spec, **keywords):
    with pytest.raises(keywords.pop("error", ValueError), match=message):
      lattice.chunk(state, inputs, spec=spec, **keywords)

  for name in ("key", "value", "log_decay", "write_rate"):
    wrong = inputs._replace(**{name: getattr(inputs, name)[..., :0]})
    refused(f"{name} has shape .* expected", wrong)
  refused("query has shape", inputs._replace(query=inputs.query[..., :5]))
  refused(
    r"query has shape .* expected \[batch=2, time, heads=2, num_slots=6\]",
    jax.tree.map(lambda x: x[:, 0], inputs),
  )
  refused(
    r"state\.memory has shape .*num_slots=5", spec=lattice.Spec(num_slots=5)
  )
  token = lattice.Spec(num_slots=6, gradient_at="token")
  refused(r"state\.memory_start is given.*the same spec", spec=token)
  refused(
    r"state\.write_rate_sum is missing.*the same spec",
    spec=lattice.Spec(num_slots=6, sparsity=0.1),
  )
  for name, message in (
    ("library_gpu", "no library_gpu"),
    ("fast", "has no fast"),
  ):
    refused(message, implementation=name, error=NotImplementedError)
