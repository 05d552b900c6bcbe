"""The two-pass delta rule token by token.

Symbols: S_K, S_V the memories, rows by input; x, k, v, r = source, key, value,
query; alpha = 1 - exp(log_decay), theta = write_rate, lambda the weight decays;
nsilu(z) = silu(z) / |silu(z)| * sqrt(len z).

  first pass   S_K <- (1 - alpha) S_K - theta (x e_K^T + lambda_k S_K)
               e_K = S_K^T x - k
  code         c = nsilu(S_K^T x)                  with the S_K just written
  second pass  S_V <- (1 - alpha) S_V - theta (c e_V^T + lambda_v S_V)
               e_V = S_V^T c - v
  read         y = S_V^T nsilu(S_K^T r)            after the write, or before

Each pass is a gradient step on |S^T x - k|^2 / 2 with weight decay. This is a
gated delta rule whose error is taken before the decay.
"""

import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.math import activations
from memcomp_kernels.options import not_negative, option, options, positive

Gates = tuple[jax.Array, jax.Array]
"""Decay and rate of one pass, each `[..., 1]`."""


@options
class Spec:
  """The options of a two-pass delta memory; each field changes the function.

  Attributes:
    key_weight_decay: lambda_k >= 0, weight decay of the first pass's memory.
    value_weight_decay: lambda_v >= 0, weight decay of the second pass's memory.
    read_first: whether a token is read before it is written. The default is
      after.
    code_eps: eps inside the norm of a code, > 0. It bounds that norm's Jacobian
      by about sqrt(key_dim / eps).
  """

  key_weight_decay: float = option(0.0, not_negative)
  value_weight_decay: float = option(0.0, not_negative)
  read_first: bool = False
  code_eps: float = option(1e-6, positive)


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: r, which reads the memories: a query, or the token's key again.
    source: x, the input of the first pass.
    key: k, the target of the first pass.
    value: v, the target of the second pass.
    log_decay: log(1 - alpha) <= 0.
    write_rate: theta >= 0, one for both passes or one for each. Steps overshoot
      from theta |x|^2 = 2 on in the first pass, and from theta key_dim = 2 on
      in the second.
    active: 1 where the token writes. 0 where it only reads and both memories
      stay unchanged. None is 1.
  """

  query: Annotated[jax.Array, "batch time heads source_dim"]
  source: Annotated[jax.Array, "batch time heads source_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1"]
  write_rate: Annotated[jax.Array, "batch time heads 1|2"]
  active: Annotated[jax.Array | None, "batch time heads 1"] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    key_memory: S_K.
    value_memory: S_V.
    segment_id: the current segment, 0 before any token.
  """

  key_memory: Annotated[jax.Array, "batch heads source_dim key_dim"]
  value_memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def gates_of_passes(
  inputs: Inputs, spec: Spec, dtype: jnp.dtype
) -> tuple[Gates, Gates]:
  """Returns (decay, rate), each `[..., 1]`, of the first and second pass.

  The decay is 1 - alpha - theta lambda, but at least 0. A token that is not
  active has decay 1 and rate 0.
  """
  kept = jnp.exp(inputs.log_decay.astype(dtype))
  rate = inputs.write_rate.astype(dtype)
  rates = rate[..., :1], rate[..., -1:]

  def gates(rate, weight_decay):
    decay = jnp.maximum(kept - weight_decay * rate, 0)
    if inputs.active is None:
      return decay, rate
    active = inputs.active > 0.5
    return jnp.where(active, decay, 1), jnp.where(active, rate, 0)

  return (
    gates(rates[0], spec.key_weight_decay),
    gates(rates[1], spec.value_weight_decay),
  )


def nsilu(z: jax.Array, eps: float) -> jax.Array:
  """Returns a code of length sqrt(len z)."""
  unit = activations.l2_norm(jax.nn.silu(z), eps)
  return math.sqrt(z.shape[-1]) * unit


def answer(S: jax.Array, x: jax.Array) -> jax.Array:
  """Returns S^T x."""
  return einsum("bhio,bhi->bho", S, x)


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads, or reads first; see `Op.step`."""
  S_K, S_V = state.key_memory, state.value_memory
  dtype = S_K.dtype
  r, x, k, v = (a.astype(dtype) for a in inputs[:4])
  first, second = gates_of_passes(inputs, spec, dtype)

  def write(S, gates, x, target):
    decay, theta = gates
    e = answer(S, x) - target
    return decay[..., None] * S - einsum("bhi,bho->bhio", x, theta * e)

  def read():
    return answer(S_V, nsilu(answer(S_K, r), spec.code_eps))

  before = read()
  S_K = write(S_K, first, x, k)
  S_V = write(S_V, second, nsilu(answer(S_K, x), spec.code_eps), v)
  y = before if spec.read_first else read()
  segment_id = contract.next_segment_id(state.segment_id)
  return State(S_K, S_V, segment_id), y.astype(inputs.query.dtype)
