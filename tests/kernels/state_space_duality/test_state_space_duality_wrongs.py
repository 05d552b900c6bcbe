"""The contract suite bites: mistakes in the duality turn it red."""

import jax.numpy as jnp
import pytest

from memcomp_kernels import affine
from memcomp_kernels.math import decay
from memcomp_kernels.state_space_duality import tile
from memcomp_kernels.testing import checks, memories, subjects

MEMORY = memories.MEMORIES["state_space_duality"]
OWN, SHARED = (
  subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")
  for name in ("own", "shared")
)


def assert_red(subject, time=100):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject, time)


def with_factors(monkeypatch, change):
  """Changes the decay factors of a tile."""
  right = decay.decay_factors
  monkeypatch.setattr(decay, "decay_factors", lambda x: change(right(x)))


def test_a_mask_that_decays_a_write_at_once(monkeypatch):
  """L_{ii} is 1: a token's own decay is of what was before it."""

  def change(factors):
    own = jnp.diagonal(factors.between, offset=-1, axis1=-2, axis2=-1)
    own = jnp.pad(own, [(0, 0)] * (own.ndim - 1) + [(1, 0)])
    return factors._replace(between=factors.between * own[..., None, :])

  with_factors(monkeypatch, change)
  assert_red(OWN)


def test_a_state_that_does_not_decay_for_reads(monkeypatch):
  right = tile.prepare

  def prepare(*arguments):
    return right(*arguments)._replace(log_scale=None)

  monkeypatch.setattr(tile, "prepare", prepare)
  assert_red(OWN)


@pytest.mark.slow
def test_heads_of_a_group_in_turn(monkeypatch):
  """Head h in group h % groups, not h // heads_per_group."""

  def split_heads(x, groups):
    return jnp.swapaxes(x.reshape(x.shape[0], -1, groups, *x.shape[2:]), 1, 2)

  sizes = dict(OWN.sizes) | {"heads": 4}
  subject = subjects.Subject(
    MEMORY, SHARED.spec, "xla_chunked", tuple(sizes.items())
  )
  monkeypatch.setattr(affine, "split_heads", split_heads)
  assert_red(subject)


def test_steps_left_out_of_the_write(monkeypatch):
  right = tile.prepare

  def prepare(inputs, *rest):
    rate = jnp.where(inputs.write_rate == 0, 0, 1).astype(inputs.value.dtype)
    return right(inputs._replace(write_rate=rate), *rest)

  monkeypatch.setattr(tile, "prepare", prepare)
  assert_red(OWN)
