"""The two-pass delta rule token by token.

Symbols, rows by what is given: S_K, S_V the memories; x, k, v, r = source, key,
value, query; alpha = 1 - exp(log_decay), theta = write_rate, lambda the weight
decays; nsilu(z) = silu(z) / |silu(z)| * sqrt(len z).

  first pass   S_K <- (1 - alpha) S_K - theta (x e_K^T + lambda_k S_K)
               e_K = S_K^T x - k
  code         c = nsilu(S_K^T x)                  with the S_K just written
  second pass  S_V <- (1 - alpha) S_V - theta (c e_V^T + lambda_v S_V)
               e_V = S_V^T c - v
  read         y = S_V^T nsilu(S_K^T r)            after the write, or before

Each pass is a gradient step on |S^T x - k|^2 / 2 with weight decay: a gated
delta rule whose error is taken before the decay.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.math import activations
from memcomp_kernels.two_pass_delta import gates, types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def nsilu(z: jax.Array, eps: float) -> jax.Array:
  """A code of length sqrt(len z)."""
  unit = activations.l2_norm(jax.nn.silu(z), eps)
  return math.sqrt(z.shape[-1]) * unit


def answer(S: jax.Array, x: jax.Array) -> jax.Array:
  """S^T x."""
  return _einsum("bhio,bhi->bho", S, x)


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Writes one token, then reads; the other way round with `read_first`.

  Args:
    state: the memories before the token.
    inputs: `[batch, heads, ...]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and y `[batch, heads, value]` in query's dtype.
  """
  S_K, S_V = state.key_memory, state.value_memory
  dtype = S_K.dtype
  r, x, k, v = (a.astype(dtype) for a in inputs[:4])
  first, second = gates.of_passes(inputs, spec, dtype)

  def write(S, gates, x, target):
    decay, theta = gates
    e = answer(S, x) - target
    return decay[..., None] * S - _einsum("bhi,bho->bhio", x, theta * e)

  def read():
    return answer(S_V, nsilu(answer(S_K, r), spec.code_eps))

  before = read()
  S_K = write(S_K, first, x, k)
  S_V = write(S_V, second, nsilu(answer(S_K, x), spec.code_eps), v)
  y = before if spec.read_first else read()
  segment_id = contract.next_segment_id(state.segment_id)
  return types.State(S_K, S_V, segment_id), y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
