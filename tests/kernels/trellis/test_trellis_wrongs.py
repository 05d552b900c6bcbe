"""The contract suite bites: each well-known mistake must turn it red."""

import dataclasses
import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.math import activations, decay
from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.testing import checks, memories, packed_checks, subjects
from memcomp_kernels.trellis import tile

TRELLIS = memories.MEMORIES["trellis"]
STALE = subjects.Subject(TRELLIS, TRELLIS.specs["chunk-ln_silu"], "xla_chunked")
EXACT = subjects.Subject(TRELLIS, TRELLIS.specs["token"], "xla_chunked")


def masked_decay(causal, exp_first=False):
  """`decay_factors` with another mask, or with exp before the mask."""

  def factors(log_decay):
    right = decay_factors(log_decay)
    cumulative = jnp.cumsum(log_decay, axis=-1)
    difference = cumulative[..., :, None] - cumulative[..., None, :]
    mask = causal(jnp.ones(difference.shape[-2:], bool))
    if exp_first:
      between = jnp.where(mask, jnp.exp(difference), 0)
    else:
      between = jnp.where(mask, jnp.exp(jnp.where(mask, difference, 0)), 0)
    return right._replace(between=between)

  decay_factors = decay.decay_factors
  return factors


def with_directions(monkeypatch, function):
  """Replaces the write direction in the chunk form only."""
  wrong = python_types.SimpleNamespace(
    activate=activations.activate, write_direction=function
  )
  monkeypatch.setattr(tile, "activations", wrong)


def with_flags(monkeypatch, **changes):
  """Forgets flags of the tile layout."""
  right = layout_lib.indexed

  def indexed(*args, **keywords):
    layout = right(*args, **keywords)
    wrong = {name: jnp.zeros_like(layout.flags.resets) for name in changes}
    flags = layout.flags._replace(**wrong)
    return dataclasses.replace(layout, flags=flags)

  monkeypatch.setattr(layout_lib, "indexed", indexed)


def test_mask_off_by_one(monkeypatch):
  wrong = masked_decay(lambda ones: jnp.tril(ones, -1))
  monkeypatch.setattr(decay, "decay_factors", wrong)
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(STALE, 37)


def test_mask_that_sees_the_future(monkeypatch):
  wrong = masked_decay(lambda ones: jnp.tril(ones, 1))
  monkeypatch.setattr(decay, "decay_factors", wrong)
  with pytest.raises(AssertionError, match="causality"):
    checks.check_causal(STALE, 37)


@pytest.mark.slow
def test_exp_before_mask(monkeypatch):
  wrong = masked_decay(jnp.tril, exp_first=True)
  monkeypatch.setattr(decay, "decay_factors", wrong)
  checks.check_values(STALE, 37)  # ordinary values hide it
  with pytest.raises(AssertionError, match="forgets all"):
    checks.check_edges(STALE, 29)


@pytest.mark.slow
def test_chunk_mean_of_the_writes(monkeypatch):
  def mean(name, z, target, eps):
    u = activations.write_direction(name, z, target, eps)
    return jnp.broadcast_to(jnp.mean(u, axis=-2, keepdims=True), u.shape)

  with_directions(monkeypatch, mean)
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(STALE, 37)


@pytest.mark.slow
def test_error_without_the_jacobian(monkeypatch):
  def error(name, z, target, eps):
    return activations.activate(name, z, eps) - target

  with_directions(monkeypatch, error)
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(STALE, 37)


@pytest.mark.slow
def test_first_order_gradient_only(monkeypatch):
  import jax

  def stopped(name, z, target, eps):
    z = jax.lax.stop_gradient(z)
    return activations.write_direction(name, z, target, eps)

  with_directions(monkeypatch, stopped)
  checks.check_values(STALE, 37)  # the values are right
  with pytest.raises(AssertionError, match="gradients: over 1e-10"):
    checks.check_truth(STALE, 37)


@pytest.mark.slow
def test_segments_that_leak(monkeypatch):
  with_flags(monkeypatch, resets=False)
  with pytest.raises(AssertionError, match="packed"):
    packed_checks.check_packing(STALE, [5, 9], 1)


@pytest.mark.slow
def test_chunks_on_the_grid_of_the_call(monkeypatch):
  with_flags(monkeypatch, continues=False)
  with pytest.raises(AssertionError, match="pieces"):
    checks.check_hand_off(STALE, piece=5, pieces=9)


@pytest.mark.slow
def test_a_reset_without_its_gradient(monkeypatch):
  right = form_lib.ENGINE

  def wrong(*args):
    gradient = right.backward(*args)
    zero = tuple(jnp.zeros_like(x) for x in gradient.reset)
    return gradient._replace(reset=zero)

  monkeypatch.setattr(form_lib, "ENGINE", right._replace(backward=wrong))
  with pytest.raises(AssertionError, match="packed: gradients"):
    packed_checks.check_packing(STALE, [5, 9], 1)


@pytest.mark.slow
def test_a_decay_too_many_in_the_exact_recurrence(monkeypatch):
  right = decay.decay_before

  def wrong(log_decay):
    factors = decay.decay_factors(log_decay)
    return right(log_decay)._replace(from_start=factors.from_start)

  monkeypatch.setattr(decay, "decay_before", wrong)
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(EXACT, 37)


def test_unfinished_sweeps_are_not_exact(monkeypatch):
  """A fixed number of sweeps over the system, the popular short cut."""

  def sweeps(direction, base, coupling, parameters, solver):
    strict = jnp.tril(coupling, -1)
    u = direction(base, parameters)
    for _ in range(4):
      u = direction(base - strict @ u, parameters)
    return u, solver_lib.no_stats(base.shape[:-2])

  monkeypatch.setattr(solver_lib, "solve", sweeps)
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(EXACT, 37)
