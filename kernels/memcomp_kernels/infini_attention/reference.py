"""Infini-attention token by token, as the paper writes it (2404.07143).

Symbols: q, k, v of the token, those of the memory without position; sigma = elu
+ 1; M, z what is written so far; M', z' the same before the current segment;
g = read_gate, the paper's sigmoid(beta).

  read     A_mem = sigma(q) M' / (sigma(q) z')                       eq. (3)
  linear   M <- M + sigma(k)^T v,    z <- z + sigma(k)               eq. (4)
  delta    M <- M + sigma(k)^T (v - sigma(k) M' / (sigma(k) z'))     eq. (5)
  output   A = g A_mem + (1 - g) A_dot                               eq. (6)

A_dot is softmax attention over the segment's tokens so far, or over a window.
The paper writes a segment's tokens at once, after it: the sums are the same. In
segments of one token M' holds all tokens before it. Quotients have eps added to
their divisor.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.infini_attention import types
from memcomp_kernels.math import feature_maps
from memcomp_kernels.softmax_attention import api as attention

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

sigma = feature_maps.FEATURE_MAPS["elu"]


def associate(
  written: types.Association,
  start: types.Association,
  features: tuple[jax.Array, jax.Array],
  v: jax.Array,
  spec: types.Spec,
) -> tuple[types.Association, jax.Array]:
  """Reads, then writes one token's features sigma(q), sigma(k) and v."""
  q, k = features

  def answer(x):
    sums = _einsum("bhk,bhk->bh", x, start.normalizer)[..., None]
    return _einsum("bhk,bhkv->bhv", x, start.memory) / (sums + spec.eps)

  u = v - answer(k) if spec.rule == "delta" else v
  M = written.memory + _einsum("bhk,bhv->bhkv", k, u)
  return types.Association(M, written.normalizer + k), answer(q)


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Reads the memory, writes one token, attends.

  Args:
    state: before the token.
    inputs: `[batch, heads, dim]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and y `[batch, heads, value]` in query's dtype.
  """
  dtype = state.keys.dtype
  q, k, v, g, memory_q, memory_k = jax.tree.map(
    lambda x: x.astype(dtype), inputs
  )
  memory_q = q if memory_q is None else memory_q
  memory_k = k if memory_k is None else memory_k

  local, A_dot = attention.step(
    attention.State(state.keys, state.values, state.position, state.segment_id),
    attention.Inputs(q, k, v),
    spec=spec.local(),
  )
  start = state.association
  if state.start is not None:
    first = state.position % spec.segment_size == 0
    start = contract.batched_where(first, state.association, state.start)
  association, A_mem = associate(
    state.association, start, (sigma(memory_q), sigma(memory_k)), v, spec
  )
  if state.start is not None:
    last = local.position % spec.segment_size == 0
    start = contract.batched_where(last, association, start)
  y = g * A_mem + (1 - g) * A_dot
  state = types.State(
    keys=local.keys,
    values=local.values,
    association=association,
    start=None if state.start is None else start,
    position=local.position,
    segment_id=local.segment_id,
  )
  return state, y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
