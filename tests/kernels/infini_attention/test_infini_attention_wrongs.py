"""The contract suite bites: mistakes in Infini-attention turn it red."""

import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels.infini_attention import tile
from memcomp_kernels.math import delta
from memcomp_kernels.softmax_attention import tile as attention_tile
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["infini_attention"]
SEGMENTS, LINEAR, TOKEN = (
  subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
  for name in ("segments", "segments-linear-window", "token")
)


def assert_red(subject):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, 37)


def test_tokens_that_read_their_own_write(monkeypatch):
  wrong = python_types.SimpleNamespace(
    **vars(jnp) | {"tril": lambda x, k: jnp.tril(x, k + 1)}
  )
  monkeypatch.setattr(tile, "jnp", wrong)
  checks.check_values(LINEAR, 37)  # in segments nothing is read there
  assert_red(TOKEN)


def test_errors_that_do_not_see_each_other(monkeypatch):
  wrong = python_types.SimpleNamespace(
    **vars(delta) | {"solve": lambda coupling, target: target}
  )
  monkeypatch.setattr(tile, "delta", wrong)
  assert_red(TOKEN)


@pytest.mark.slow
def test_a_coupling_without_the_sums(monkeypatch):
  """The divisor belongs to the row, all of it."""

  def solve(coupling, target):
    return delta.solve(jnp.sign(coupling), target)

  wrong = python_types.SimpleNamespace(**vars(delta) | {"solve": solve})
  monkeypatch.setattr(tile, "delta", wrong)
  assert_red(TOKEN)


@pytest.mark.slow
def test_segments_that_read_what_they_wrote_before_a_cut(monkeypatch):
  """M in place of M' where a sequence was cut inside a segment."""
  right = tile.run

  def run(call):
    return right(call._replace(starts=call.memories))

  monkeypatch.setattr(tile, "run", run)
  checks.check_values(SEGMENTS, 37)  # in one call they are the same
  with pytest.raises(AssertionError, match="pieces"):
    checks.check_hand_off(SEGMENTS, piece=5, pieces=9)


def test_a_segment_that_sees_the_one_before(monkeypatch):
  right = attention_tile.sees

  def sees(position, other, *, spec, ring):
    del spec
    blind = python_types.SimpleNamespace(
      window_size=None, chunk_size=None, sink_tokens=0
    )
    return right(position, other, spec=blind, ring=ring)

  monkeypatch.setattr(attention_tile, "sees", sees)
  checks.check_values(TOKEN, 37)  # a sliding window stays one
  assert_red(SEGMENTS)
