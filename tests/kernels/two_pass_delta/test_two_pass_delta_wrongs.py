"""The contract suite bites: mistakes in the two-pass delta rule turn it red."""

import types as python_types

import pytest

from memcomp_kernels.math import decay
from memcomp_kernels.testing import checks, memories, subjects
from memcomp_kernels.two_pass_delta import reference, tile

MEMORY = memories.MEMORIES["two_pass_delta"]
SUBJECT, READ_FIRST, ALL_INPUTS = (
  subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
  for name in ("write-first", "read-first", "weight-decay")
)


def patched(monkeypatch, module, **functions):
  """Replaces functions of a module in the chunk form only."""
  name = module.__name__.rpartition(".")[2]
  wrong = python_types.SimpleNamespace(**vars(module) | functions)
  monkeypatch.setattr(tile, name, wrong)


def assert_red(subject=SUBJECT):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, 37)


def test_errors_after_the_decay(monkeypatch):
  """As Gated DeltaNet takes them."""

  def after(log_decay):
    factors = decay.decay_factors(log_decay)
    return decay.DecayBefore(factors.from_start, factors.between)

  patched(monkeypatch, decay, decay_before=after)
  assert_red()


def test_codes_of_the_memory_before_the_write(monkeypatch):
  def before(self, query, *, first=False):
    del first
    return right(self, query, first=True)

  right = tile.Pass.read
  monkeypatch.setattr(tile.Pass, "read", before)
  assert_red()


@pytest.mark.slow
def test_reads_after_the_write(monkeypatch):
  def after(self, query, *, first=False):
    del first
    return right(self, query)

  right = tile.Pass.read
  monkeypatch.setattr(tile.Pass, "read", after)
  checks.check_values(SUBJECT, 37)  # which does
  assert_red(READ_FIRST)


@pytest.mark.slow
def test_one_rate_for_both_passes(monkeypatch):
  def first_only(inputs, spec, dtype):
    rate = inputs.write_rate[..., :1]
    return reference.gates_of_passes(
      inputs._replace(write_rate=rate), spec, dtype
    )

  patched(monkeypatch, reference, gates_of_passes=first_only)
  assert_red(ALL_INPUTS)


def test_all_tokens_active(monkeypatch):
  def every(inputs, spec, dtype):
    return reference.gates_of_passes(inputs._replace(active=None), spec, dtype)

  patched(monkeypatch, reference, gates_of_passes=every)
  assert_red(ALL_INPUTS)
