"""The contract suite bites: mistakes in test-time training turn it red."""

import types as python_types

import jax.numpy as jnp
import pytest
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.test_time_training import inner, rows, tile
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["test_time_training"]
STALE, TOKEN, TOKEN_MLP = (
  subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
  for name in ("linear", "linear-token", "mlp-token")
)


def with_gradient(monkeypatch, function):
  """Replaces the gradient at z in the chunk form."""
  wrong = python_types.SimpleNamespace(**vars(inner) | {"gradient": function})
  monkeypatch.setattr(rows, "inner", wrong)


def assert_red(subject=STALE):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, 37)


def test_error_without_the_jacobian_of_the_norm(monkeypatch):
  def error(eps, z, labels):
    return inner.norm(z, labels.scale, labels.bias, eps) - labels.target

  with_gradient(monkeypatch, error)
  assert_red()


def test_value_as_the_target(monkeypatch):
  """Without the residual the target would be v, not v - k."""

  def run(call):
    moved = call.inputs._replace(value=call.inputs.value + call.inputs.key)
    return right(call._replace(inputs=moved))

  right = tile.run
  monkeypatch.setattr(tile, "run", run)
  assert_red()


@pytest.mark.slow
def test_first_order_gradient_only(monkeypatch):
  def stopped(eps, z, labels):
    return inner.gradient(eps, lax.stop_gradient(z), labels)

  with_gradient(monkeypatch, stopped)
  checks.check_values(STALE, 37)  # the values are right
  with pytest.raises(AssertionError, match="gradients: over 1e-10"):
    checks.check_truth(STALE, 37)


def test_chunks_that_end_with_all_of_the_step(monkeypatch):
  """The next chunk starts at W' + c (A - W'), not at A."""
  wrong = python_types.SimpleNamespace(
    **vars(contract) | {"batched_where": lambda condition, x, y: y}
  )
  monkeypatch.setattr(tile, "contract", wrong)
  assert_red()


@pytest.mark.slow
def test_unfinished_sweeps_are_not_exact(monkeypatch):
  def sweeps(direction, base, coupling, parameters, solver):
    strict = jnp.tril(coupling, -1)
    u = direction(base, parameters)
    for _ in range(2):
      u = direction(base - strict @ u, parameters)
    return u, solver_lib.no_stats(base.shape[:-2])

  wrong = python_types.SimpleNamespace(**vars(solver_lib) | {"solve": sweeps})
  monkeypatch.setattr(rows, "solver_lib", wrong)
  assert_red(TOKEN)


@pytest.mark.slow
def test_a_second_layer_of_the_tiles_start(monkeypatch):
  """Its writes forgotten until the tile ends."""
  dim = dict(TOKEN_MLP.sizes)["value_dim"]

  def update(done, row, t, axis):
    if row.shape[-1] == dim:  # u_2
      row = jnp.zeros_like(row)
    return lax.dynamic_update_index_in_dim(done, row, t, axis)

  wrong = python_types.SimpleNamespace(
    scan=lax.scan, dynamic_update_index_in_dim=update
  )
  monkeypatch.setattr(rows, "lax", wrong)
  assert_red(TOKEN_MLP)
