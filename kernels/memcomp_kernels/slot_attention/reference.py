"""Slot attention token by token.

Symbols: k, v, q a token's key, value and query; alpha = exp(log_decay) and s =
write_logit, a number per slot i.

  write  K~_i <- a_i K~_i + w_i k,   V~_i <- a_i V~_i + w_i v
  read   y = sum_i p_i V~_i,         p = softmax(scale K~ q)

Gated Slot Attention (arXiv 2409.07146, eq. (6)-(7)):

  a = alpha,              w = 1 - alpha

Attention with bounded-memory control (ABC, arXiv 2110.02488, eq. (4)-(6)). Its
learned control exp(s) is normalised over the tokens so far:

  z' = log(exp(z) + exp(s)),   a = exp(z - z'),   w = exp(s - z')

A token is written before it is read.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import at_least, one_of, option, options, positive
from memcomp_kernels.shapes import If

RULES = ("gated", "softmax")

EMPTY = -1e30
"""The log of zero weight. It is finite, so that differences are numbers."""


@options
class Spec:
  """The options of a slot attention memory.

  Attributes:
    num_slots: number of rows of each memory, >= 1.
    rule: how slots store tokens. "gated" is Gated Slot Attention: each slot has
      a decay, and a write has the share that the decay frees. "softmax" is
      attention with bounded-memory control: each slot is a softmax average over
      tokens.
    scale: factor of the slots' scores; None is key_dim ** -0.5.
  """

  num_slots: int = option(64, at_least(1))
  rule: str = option("gated", one_of(RULES))
  scale: float | None = option(1.0, positive)


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: the query that reads the slots.
    key: the key that is written to the slots' keys.
    value: the value that is written to the slots' values.
    log_decay: log alpha <= 0 of every slot, only for rule "gated".
    write_logit: s of every slot, only for rule "softmax".
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[
    jax.Array | None, "batch time heads num_slots", If("rule", "gated")
  ] = None
  write_logit: Annotated[
    jax.Array | None, "batch time heads num_slots", If("rule", "softmax")
  ] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    key_memory: K~.
    value_memory: V~.
    log_total: z, the log of the sum of exp(s) so far, `EMPTY` before any token.
      Only for rule "softmax".
    segment_id: the current segment, 0 before any token.
  """

  key_memory: Annotated[jax.Array, "batch heads num_slots key_dim"]
  value_memory: Annotated[jax.Array, "batch heads num_slots value_dim"]
  log_total: Annotated[
    jax.Array | None, "batch heads num_slots", If("rule", "softmax")
  ]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  dtype = state.key_memory.dtype
  q, k, v, log_alpha, s = jax.tree.map(
    lambda x: None if x is None else x.astype(dtype),
    tuple(inputs),
    is_leaf=lambda x: x is None,
  )
  z = state.log_total
  if z is None:  # "gated"
    a = jnp.exp(log_alpha)
    w = -jnp.expm1(log_alpha)  # 1 - a would cancel if little is forgotten
  else:
    before, z = z, jnp.logaddexp(z, s)
    a = jnp.exp(before - z)
    w = jnp.exp(s - z)
  K = a[..., None] * state.key_memory + w[..., None] * k[..., None, :]
  V = a[..., None] * state.value_memory + w[..., None] * v[..., None, :]
  scale = contract.read_scale(spec, q.shape[-1])
  p = jax.nn.softmax(scale * einsum("bhmk,bhk->bhm", K, q), axis=-1)
  y = einsum("bhm,bhmv->bhv", p, V)
  segment_id = contract.next_segment_id(state.segment_id)
  return State(K, V, z, segment_id), y.astype(inputs.query.dtype)
