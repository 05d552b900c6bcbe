"""Writes are steps down the objectives that the facts of the memories name.

Here those that no `test_<memory>_definition.py` has: a token is written by
`step`, and by the gradient of what `Op.facts` says.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.infini_attention import reference as infini_attention
from memcomp_kernels.testing import memories

SIZES = {"batch": 2, "heads": 3, "key_dim": 5, "value_dim": 4}
TOKENS = 3


pytestmark = pytest.mark.usefixtures("float64")


def one_token(name, change=None, **fields):
  """The spec, the state before the last token, the token, the state after it."""
  memory = memories.MEMORIES[name]
  spec = memory.op.Spec(**fields)
  state = memory.make_state(jax.random.key(0), spec, **SIZES)
  inputs = memory.make_inputs(jax.random.key(1), spec, time=TOKENS, **SIZES)
  if change is not None:
    inputs = change(inputs)
  inputs = jax.device_get(inputs)  # so that no cut is a program
  step = jax.jit(lambda state, token: memory.op.step(state, token, spec=spec))
  *before, token = (
    jax.tree.map(operator.itemgetter((slice(None), t)), inputs)
    for t in range(TOKENS)
  )
  for other in before:
    state, _ = step(state, other)
  after, _ = step(state, token)
  return spec, state, token, after


def assert_close(actual, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12),
    actual,
    expected,
  )


def answer(memory, key):
  """What a memory of rows by key answers to a key."""
  return jnp.einsum("bhkv,bhk->bhv", memory, key)


def half_square(x):
  return jnp.sum(jnp.square(x)) / 2


def of_heads(gate):
  """A number for each head, beside a matrix."""
  return gate[..., None]


@pytest.mark.parametrize("rule", ("gated", "softmax"))
def test_slot_attention(rule):
  _, state, token, after = one_token("slot_attention", num_slots=6, rule=rule)
  if rule == "gated":
    w = 1 - jnp.exp(token.log_decay)
  else:
    w = jnp.exp(token.write_logit - after.log_total)

  def loss(slots):
    K, V = slots
    to_key = jnp.sum((K - token.key[:, :, None]) ** 2, -1)
    to_value = jnp.sum((V - token.value[:, :, None]) ** 2, -1)
    return jnp.sum(w * (to_key + to_value)) / 2

  slots = state.key_memory, state.value_memory
  expected = jax.tree.map(jnp.subtract, slots, jax.jit(jax.grad(loss))(slots))
  assert_close((after.key_memory, after.value_memory), expected)


@pytest.mark.parametrize("rule", ("linear", "delta"))
def test_infini_attention(rule):
  spec, state, token, after = one_token(
    "infini_attention", segment_size=8, rule=rule
  )
  k = infini_attention.sigma(
    token.key if token.memory_key is None else token.memory_key
  )
  d = jnp.einsum("bhk,bhk->bh", k, state.start.normalizer)[..., None] + spec.eps

  def loss(M):
    if rule == "linear":
      return -jnp.sum(answer(M, k) * token.value)
    return half_square(answer(M, k) / d - token.value)

  rate = 1 if rule == "linear" else of_heads(d)
  M = state.association.memory - rate * jax.jit(jax.grad(loss))(
    state.start.memory
  )
  assert_close(after.association.memory, M)
  assert_close(after.association.normalizer, state.association.normalizer + k)


@pytest.mark.parametrize("rule", ("outer", "delta"))
def test_tensor_cache(rule):
  _, state, token, after = one_token(
    "tensor_cache", window_size=9, chunk_size=8, rule=rule
  )
  before, start, now = (
    x.memory[:, :, 0, 0] for x in (state.memories, state.starts, after.memories)
  )

  def loss(A):
    if rule == "outer":
      return -jnp.sum(answer(A, token.key) * token.value)
    return half_square(answer(A, token.key) - token.value)

  decayed = of_heads(jnp.exp(token.log_decay)) * before
  expected = decayed - of_heads(token.write_rate) * jax.jit(jax.grad(loss))(
    start
  )
  assert_close(now, expected)


def test_linear_attention():
  _, state, token, after = one_token("linear_attention")
  k = infini_attention.sigma(token.key)

  def loss(S):
    return -jnp.sum(answer(S, k) * token.value)

  assert_close(
    after.memory, state.memory - jax.jit(jax.grad(loss))(state.memory)
  )


def test_state_space_duality():
  _, state, token, after = one_token("state_space_duality")

  def loss(h):
    return -jnp.sum(answer(h, token.key) * token.value)

  decayed = of_heads(jnp.exp(token.log_decay)) * state.memory
  expected = decayed - of_heads(token.write_rate) * jax.jit(jax.grad(loss))(
    state.memory
  )
  assert_close(after.memory, expected)


def test_rwkv7_that_writes_what_it_removes():
  def alike(inputs):
    return inputs._replace(key=inputs.write_rate * inputs.removal_key)

  _, state, token, after = one_token("rwkv7", alike)

  def loss(S):
    return half_square(answer(S, token.removal_key) - token.value)

  decayed = jnp.exp(token.log_decay)[..., None] * state.memory
  rate = token.write_rate[..., None]
  assert_close(
    after.memory, decayed - rate * jax.jit(jax.grad(loss))(state.memory)
  )
