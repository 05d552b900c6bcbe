"""The contract suite bites: mistakes in Lattice turn it red."""

import dataclasses
import types as python_types

import jax
import jax.numpy as jnp
import pytest

from memcomp_kernels.lattice import reference, tile
from memcomp_kernels.math import channel_decay
from memcomp_kernels.testing import (
  checks,
  errors,
  memories,
  subjects,
  tolerances,
)

MEMORY = memories.MEMORIES["lattice"]


def subject(name="chunk-decoding"):
  return subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")


def assert_red(name="chunk-decoding"):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject(name), 37)


def in_tile(monkeypatch, module, **functions):
  """Replaces functions of a module in the chunk form only."""
  name = module.__name__.rpartition(".")[2]
  wrong = python_types.SimpleNamespace(**vars(module) | functions)
  monkeypatch.setattr(tile, name, wrong)


def with_shares(monkeypatch, change):
  """Changes a chunk's shares."""
  right = channel_decay.channel_decay

  def wrong(log_decay, block):
    return change(right(log_decay, block))

  in_tile(monkeypatch, channel_decay, channel_decay=wrong)


@pytest.mark.slow
def test_what_is_patched_is_right(monkeypatch):
  for module in (reference, channel_decay):
    in_tile(monkeypatch, module)
  with_shares(monkeypatch, lambda shares: shares)
  checks.check_values(subject(), 37)


@pytest.mark.slow
def test_no_tangent_projection(monkeypatch):
  """What lies along a column is written, too."""
  right = tile.run

  def run(call):
    spec = dataclasses.replace(call.spec, update="delta")
    return right(call._replace(spec=spec))

  monkeypatch.setattr(tile, "run", run)
  checks.check_values(subject("chunk-delta"), 37)  # which projects nothing
  assert_red("chunk-orthogonal")


def test_no_contraction(monkeypatch):
  in_tile(
    monkeypatch,
    reference,
    contraction=lambda mu, squares: jnp.ones_like(mu * squares),
  )
  assert_red()
  checks.check_values(subject("chunk-orthogonal"), 37)


@pytest.mark.slow
def test_a_contraction_without_the_decay(monkeypatch):
  in_tile(
    monkeypatch,
    reference,
    contraction=lambda mu, squares: reference.contraction(
      jnp.ones_like(mu), squares
    ),
  )
  assert_red()


def test_renormalising_an_incomplete_chunk(monkeypatch):
  right = tile.run

  def wrong(call):
    return right(call._replace(valid=jnp.ones_like(call.valid)))

  monkeypatch.setattr(tile, "run", wrong)
  checks.check_values(subject(), 32)  # chunks of 8 are all complete
  assert_red()


@pytest.mark.slow
def test_renormalising_by_beta_alone(monkeypatch):
  in_tile(monkeypatch, reference, finish=lambda S, *_: S)
  checks.check_values(subject(), 7)  # no chunk has ended
  assert_red()


@pytest.mark.slow
def test_decay_forgotten_between_blocks(monkeypatch):
  def forgotten(shares):
    if shares.to_block is None:
      return shares
    before = (shares.to_block != 0).astype(shares.to_block.dtype)
    return shares._replace(to_block=before)

  with_shares(monkeypatch, forgotten)
  checks.check_values(subject(), 37)  # chunks of one block
  assert_red("chunk-long-sparse")


@pytest.mark.slow
def test_blocks_that_do_not_see_each_other(monkeypatch):
  with_shares(monkeypatch, lambda shares: shares._replace(to_block=None))
  assert_red("chunk-long-sparse")


@pytest.mark.slow
def test_exp_of_positive_sums(monkeypatch):
  """exp(G_r) exp(-G_i), the usual split of a share."""

  def split(shares):
    size = shares.within.shape[-2]
    from_start = channel_decay.into_blocks(shares.from_start, size)
    ratio = from_start[..., :, None, :] / from_start[..., None, :, :]
    causal = jnp.tril(jnp.ones((size, size), bool))[..., None]
    return shares._replace(within=jnp.where(causal, ratio, 0))

  with_shares(monkeypatch, split)
  checks.check_values(subject(), 37)  # ordinary values hide it
  with pytest.raises(AssertionError, match="forgets all"):
    checks.check_edges(subject(), 29)


def check_two_calls(subject, first, time):
  """The hand-off inside a chunk, values only."""

  def in_two(state, inputs):
    outputs = []
    for part in (slice(None, first), slice(first, None)):
      cut = jax.tree.map(lambda x: x[:, part], inputs)  # noqa: B023
      state, y = subject.chunk(state, cut)
      outputs.append(y)
    return state, jnp.concatenate(outputs, axis=1)

  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(time)
    errors.assert_close(
      jax.jit(in_two)(*arguments),
      jax.jit(subject.reference)(*arguments),
      tolerances.VALUE["float64"],
      "two calls",
    )


@pytest.mark.slow
def test_rates_forgotten_between_calls(monkeypatch):
  sparse = subject("chunk-long-sparse")
  check_two_calls(sparse, 5, 29)
  right = tile.run

  def wrong(call):
    memory, rates = call.memories
    return right(call._replace(memories=(memory, jnp.zeros_like(rates))))

  monkeypatch.setattr(tile, "run", wrong)
  with pytest.raises(AssertionError, match="two calls: over 1e-12"):
    check_two_calls(sparse, 5, 29)


def test_gradients_of_unit_columns_only(monkeypatch):
  """|h|^2 - p^2 is |h - Phi p|^2 on the sphere, and not next to it."""
  in_tile(
    monkeypatch,
    reference,
    squared_norms=lambda S: jnp.ones_like(S[..., :1, :]),
  )
  checks.check_values(subject(), 37)  # the values are right
  with pytest.raises(AssertionError, match="gradients: over 1e-10"):
    checks.check_truth(subject(), 37)
