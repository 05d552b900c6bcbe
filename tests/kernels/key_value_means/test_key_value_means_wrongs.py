"""The contract suite bites: mistakes in Key-Value Means turn it red."""

import dataclasses

import jax.numpy as jnp
import pytest

from memcomp_kernels import key_value_means
from memcomp_kernels.key_value_means import rows, tile, xla_chunked
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["key_value_means"]
POWER = subjects.Subject(MEMORY, MEMORY.specs["power"], "xla_chunked")
FIXED = subjects.Subject(MEMORY, MEMORY.specs["fixed"], "xla_chunked")


def assert_red(subject=POWER):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, 37)


def with_spec(monkeypatch, **changes):
  """Changes the Spec for the chunk form only."""

  def chunk(call):
    spec = dataclasses.replace(call.spec, **changes)
    return xla_chunked.chunk(call._replace(spec=spec))

  monkeypatch.setitem(
    key_value_means.implementations.functions, "xla_chunked", chunk
  )


@pytest.mark.slow
def test_what_is_patched_is_right(monkeypatch):
  with_spec(monkeypatch)
  checks.check_values(POWER, 37)


@pytest.mark.slow
def test_routing_against_the_rows_before_the_append(monkeypatch):
  def without(chunk, *_):
    none = jnp.zeros(chunk.gates.shape[:-1])
    return none - jnp.inf, none.astype(jnp.int32)

  monkeypatch.setattr(rows, "new_targets", without)
  assert_red()
  checks.check_values(  # without appends there is nothing to miss
    dataclasses.replace(FIXED, spec=MEMORY.specs["no-sink"]), 37
  )


def test_merging_into_the_sink(monkeypatch):
  with_spec(monkeypatch, sink_rows=0)
  assert_red()


def test_gated_appends(monkeypatch):
  with_spec(monkeypatch, gate_appends=True)
  assert_red()


@pytest.mark.slow
def test_gated_first_rows(monkeypatch):
  right = tile.leaving

  def wrong(state, spec):
    never = state._replace(position=state.position + spec.window)
    return right(state, spec)._replace(gates=right(never, spec).gates)

  monkeypatch.setattr(tile, "leaving", wrong)
  assert_red(dataclasses.replace(POWER, spec=MEMORY.specs["gated-appends"]))


def test_a_window_that_slides(monkeypatch):
  right = tile.in_window

  def sliding(index, spec):
    """The last tokens of the window, as many for each query."""
    seen = right(index, spec)
    chunk = spec.chunk_size
    u = jnp.arange(chunk)[:, None]
    j = jnp.arange(spec.window)
    age = (index[:, None] - j // chunk) % spec.window_chunks
    distance = age[:, None] * chunk + u - j % chunk
    return seen & (distance <= spec.window - chunk)

  monkeypatch.setattr(tile, "in_window", sliding)
  assert_red()


@pytest.mark.slow
def test_a_row_too_many_at_an_update(monkeypatch):
  right = tile.room

  def wrong(state, spec, capacity):
    later = state._replace(position=state.position + spec.chunk_size)
    first = state.position == spec.window
    return jnp.where(
      first, right(state, spec, capacity), right(later, spec, capacity)
    )

  monkeypatch.setattr(tile, "room", wrong)
  with pytest.raises(AssertionError, match="length"):
    checks.check_values(POWER, 37)


@pytest.mark.slow
def test_gradients_that_stop_at_the_memory(monkeypatch):
  import jax

  right = tile.make_room

  def stopped(state, *args):
    return jax.lax.stop_gradient(right(state, *args))

  monkeypatch.setattr(tile, "make_room", stopped)
  checks.check_values(POWER, 37)  # the values are right
  with pytest.raises(AssertionError, match="gradients: over 1e-10"):
    checks.check_truth(POWER, 37)
