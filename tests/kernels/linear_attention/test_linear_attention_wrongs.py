"""The contract suite bites: mistakes in linear attention turn it red."""

import types as python_types

import jax.numpy as jnp
import pytest

from memcomp_kernels import affine
from memcomp_kernels.linear_attention import reference, tile
from memcomp_kernels.math import decay
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["linear_attention"]
DECAYED, PLAIN, NO_SUM = (
  subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
  for name in ("decayed", "plain", "no-sum")
)


def assert_red(subject):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, 100)


def with_factors(monkeypatch, change):
  """Changes the decay factors of a tile."""
  right = decay.decay_factors
  monkeypatch.setattr(decay, "decay_factors", lambda x: change(right(x)))


def test_reads_before_the_write(monkeypatch):
  with_factors(
    monkeypatch, lambda x: x._replace(between=jnp.tril(x.between, -1))
  )
  assert_red(NO_SUM)


@pytest.mark.slow
def test_a_memory_that_does_not_decay_from_tile_to_tile(monkeypatch):
  with_factors(monkeypatch, lambda x: x._replace(total=jnp.ones_like(x.total)))
  checks.check_values(PLAIN, 100)  # no decay hides it
  assert_red(DECAYED)


def test_a_sum_that_does_not_decay(monkeypatch):
  """z is what S is, with values of one: it decays as S does."""
  right = affine.run

  def run(memory, prepared):
    new, output = right(memory, prepared)
    kept = prepared._replace(total=jnp.ones_like(prepared.total))
    still, _ = right(memory, kept)
    return jnp.concatenate([new[..., :-1], still[..., -1:]], axis=-1), output

  monkeypatch.setattr(affine, "run", run)
  checks.check_values(PLAIN, 100)
  assert_red(DECAYED)


@pytest.mark.slow
def test_features_of_empty_places(monkeypatch):
  """elu(0) + 1 is 1: a padded place must not be counted."""
  right = tile.prepare

  def prepare(inputs, *rest):
    ones = jnp.ones_like(inputs.value[..., -1:])
    value = jnp.concatenate([inputs.value[..., :-1], ones], axis=-1)
    inputs = inputs._replace(
      key=jnp.where(inputs.key == 0, 1, inputs.key), value=value
    )
    return right(inputs, *rest)

  monkeypatch.setattr(tile, "prepare", prepare)
  checks.check_values(DECAYED, 64)  # whole tiles hide it
  assert_red(DECAYED)


def test_one_features_map_for_another(monkeypatch):
  maps = reference.FEATURE_MAPS | {"elu": reference.FEATURE_MAPS["relu"]}
  wrong = python_types.SimpleNamespace(FEATURE_MAPS=maps)
  monkeypatch.setattr(tile, "reference", wrong)
  assert_red(DECAYED)
