"""The contract suite bites: mistakes in online vector quantisation turn it red.

The choice of rows is shared by definition and chunk form: `test_ovq_definition`
and `test_ovq_agreement` hold it.
"""

import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.ovq import dictionary, tile
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["ovq"]
SUBJECT = subjects.Subject(MEMORY, MEMORY.specs["plateau"], "xla_chunked")


def patched(monkeypatch, **functions):
  """Replaces functions of the dictionary in the chunk form only."""
  wrong = python_types.SimpleNamespace(**vars(dictionary) | functions)
  monkeypatch.setattr(tile, "dictionary_lib", wrong)


def assert_red():
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(SUBJECT, 37)


@pytest.mark.slow
def test_what_is_patched_is_right(monkeypatch):
  patched(monkeypatch)
  checks.check_values(SUBJECT, 37)


def test_rows_that_are_not_in_use(monkeypatch):
  def all_rows(counts, spec):
    del spec
    return jnp.log(jnp.maximum(counts, 1))

  patched(monkeypatch, log_counts=all_rows)
  assert_red()


def test_scores_without_counts(monkeypatch):
  def no_counts(counts, spec):
    right = dictionary.log_counts(counts, spec)
    return jnp.where(right > -jnp.inf, 0.0, -jnp.inf)

  patched(monkeypatch, log_counts=no_counts)
  assert_red()


def test_keys_and_values_apart(monkeypatch):
  """Values of the tokens one place on."""

  def shifted(D, keys, values, spec):
    return dictionary.update(D, keys, jnp.roll(values, 1, axis=2), spec)

  patched(monkeypatch, update=shifted)
  assert_red()


@pytest.mark.slow
def test_a_chunk_that_is_taken_up_before_it_is_whole(monkeypatch):
  class Whole(form_lib.TileCall):
    complete = property(lambda call: jnp.ones_like(call.valid[:, -1]))

  right = tile.run
  monkeypatch.setattr(tile, "run", lambda call: right(Whole(*call)))
  checks.check_values(SUBJECT, 64)  # whole chunks
  assert_red()
