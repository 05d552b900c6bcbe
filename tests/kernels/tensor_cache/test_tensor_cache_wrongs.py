"""The contract suite bites Tensor Cache: each mistake must turn it red."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from memcomp_kernels.softmax_attention import tile as attention_tile
from memcomp_kernels.tensor_cache import tile, xla_chunked
from memcomp_kernels.testing import checks, memories, packed_checks, subjects

MEMORY = memories.MEMORIES["tensor_cache"]


def subject(name):
  return subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")


def red(name, time=19):
  with pytest.raises(AssertionError, match="over 1e-12"):
    checks.check_values(subject(name), time)


@pytest.mark.slow
def test_chunk_means_in_place_of_the_scan(monkeypatch):
  """(6) for (8): as many writes, but of means."""
  right = xla_chunked._tokens

  def means(spec, inputs, written):
    def mean(x):
      chunks = x.reshape(x.shape[0], -1, spec.chunk_size, *x.shape[2:])
      mean = jnp.mean(chunks, axis=2, keepdims=True)
      return jnp.broadcast_to(mean, chunks.shape).reshape(x.shape)

    tokens = right(spec, inputs, written)
    return tokens._replace(key=mean(tokens.key), value=mean(tokens.value))

  monkeypatch.setattr(xla_chunked, "_tokens", means)
  red("all-outer", 16)


def test_a_window_of_one_token_more(monkeypatch):
  right = attention_tile.sees

  def wider(*args, ring, **keywords):
    return right(*args, ring=ring + 1, **keywords)

  monkeypatch.setattr(attention_tile, "sees", wider)
  red("evicted-delta")


def test_a_prediction_from_the_decayed_memory(monkeypatch):
  """Right for other delta rules, wrong for (4)."""
  right = tile.prediction_errors

  def decayed(tokens, before, rate, dot):
    factor = jnp.exp(tokens.log_decay[..., 0])[:, :, None]
    before = before._replace(
      base=before.base * factor, writes=before.writes * factor[..., None]
    )
    return right(tokens, before, rate, dot)

  monkeypatch.setattr(tile, "prediction_errors", decayed)
  red("evicted-delta")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evicted-delta", "evicted-outer"])
def test_read_and_write_in_the_other_order(monkeypatch, name):
  right = tile.run

  def other(carry, reset, tokens, roles, spec):
    spec = dataclasses.replace(spec, read_after_write=not spec.read_after_write)
    return right(carry, reset, tokens, roles, spec)

  monkeypatch.setattr(tile, "run", other)
  red(name)


def test_slots_that_decay_unwritten(monkeypatch):
  right = tile.survival

  def all_decay(tokens):
    _, rate = right(tokens)
    everywhere = jnp.ones_like(tokens.write_route)
    return right(tokens._replace(write_route=everywhere))[0], rate

  monkeypatch.setattr(tile, "survival", all_decay)
  red("evicted-slots")


@pytest.mark.slow
def test_chunks_on_the_grid_of_the_call(monkeypatch):
  right = xla_chunked.tile.Roles

  def forgetful(writes, starts, phase):
    return right(writes, starts, jnp.arange(writes.shape[1])[None] % 8)

  monkeypatch.setattr(xla_chunked.tile, "Roles", forgetful)
  checks.check_values(subject("all-outer"), 19)  # one call hides it
  with pytest.raises(AssertionError, match="pieces"):
    checks.check_hand_off(subject("all-outer"), piece=5, pieces=3)


@pytest.mark.slow
def test_segments_that_leak(monkeypatch):
  right = xla_chunked.tile.Roles

  def leaky(writes, starts, phase):
    return right(writes, None, phase)

  monkeypatch.setattr(xla_chunked.tile, "Roles", leaky)
  with pytest.raises(AssertionError, match="packed"):
    # Long enough that tokens of the first segment leave the window.
    packed_checks.check_packing(subject("evicted-delta"), [14, 9], 1)


@pytest.mark.slow
def test_an_inverse_by_doubling_is_not_a_solution(monkeypatch):
  """Powers of the matrix grow where keys repeat, and cancel."""

  def doubling(coupling, target):
    power = -jnp.tril(coupling, -1)
    total = target
    for _ in range(6):
      total = total + power @ total
      power = power @ power
    return total

  monkeypatch.setattr(tile.delta, "solve", doubling)
  one = subject("evicted-delta")
  checks.check_values(one, 19)  # ordinary values hide it
  with jax.enable_x64(True):
    state, inputs = one.state(), one.inputs(64)
    inputs = MEMORY.edges(inputs)["repeated keys"]
    inputs = inputs._replace(
      write_rate=2 * jnp.ones_like(inputs.write_rate),
      log_decay=0 * inputs.log_decay,
    )
    expected = one.reference(state, inputs)[1]
    error = jnp.abs(one.chunk(state, inputs)[1] - expected).max()
    assert error > 1e-6 * jnp.abs(expected).max()
