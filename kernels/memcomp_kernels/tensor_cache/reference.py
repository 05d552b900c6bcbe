"""Tensor Cache token by token, as the paper writes it (arXiv 2605.22884).

Symbols: q, k, v inputs; W = window_size; A memory (key rows, value columns);
lambda = exp(log_decay), eta = write_rate; rho, pi the routes of a write and of
a read; alpha = read_mix.

  window     y_local = softmax(q_t K_W^T / sqrt(d)) V_W, W tokens       (1)
  read       r_t = q_t A                                                (2)
  outer      A <- lambda A + eta k (x) v                                (3)
  delta      A <- lambda A + eta k (x) (v - k A)                        (4)
  chunk mean A <- lambda A + eta mean(k) (x) mean(v), once a chunk      (6)
  chunk      every token's (3) with reads of the chunk's start is       (8)
             every token's (4) with A at the chunk's start is           (9)
  slots      A_s <- (1 + rho_s (lambda - 1)) A_s + rho_s eta k (x) u, (10)-(12)
             r = sum_s pi_s q A_s
  timescales r = q A_fast + alpha q A_slow, one u each                 (13)
  wedge      A <- lambda A + eta (k (x) v - v (x) k)                   (14)

The prediction k A of (4) has A before its decay. What is written, and when it
is read, is `write_population`: README.md, sections 2 and 3.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, window
from memcomp_kernels.tensor_cache import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

NORM_EPS = 1e-5


def unit(x: jax.Array) -> jax.Array:
  """X / (|x| + 1e-5) over the last axis, with a zero gradient at zero."""
  square = jnp.sum(x * x, axis=-1, keepdims=True)
  zero = square == 0
  norm = jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))
  return x / (norm + NORM_EPS)


def _local_attention(q, held, live):
  """(1): q `[b, h, d]` over the rows that are `live`, `[b, W]`."""
  scores = _einsum("bhd,bhwd->bhw", q, held.key) / math.sqrt(q.shape[-1])
  scores = jnp.where(live[:, None], scores, -jnp.inf)
  return _einsum("bhw,bhwe->bhe", jax.nn.softmax(scores, axis=-1), held.value)


def _read(memories: types.Memories, q, pi, alpha):
  """(2), (12), (13): r = sum over timescales and slots."""
  A, z = memories
  r = _einsum("bhk,bhnskv->bhnsv", q, A)
  if z is not None:
    along = _einsum("bhk,bhnsk->bhns", q, z)
    r = r / jnp.maximum(jnp.abs(along), 1)[..., None]
  if pi is not None:
    r = r * pi[..., None, :, None]
  r = jnp.sum(r, axis=-2)
  if alpha is None:
    return r[..., 0, :]
  return r[..., 0, :] + alpha * r[..., 1, :]


def _write(memories, seen, k, v, lam, eta, rho, rule):
  """(3), (4) or (14) into every slot; `seen` is what (4) predicts from."""
  A, z = memories
  lam, eta = lam[..., None], eta[..., None]
  if rho is not None:
    rho = rho[..., None, :]
    lam, eta = 1 + rho * (lam - 1), rho * eta
  u = v[..., None, None, :]  # over timescales and slots
  if rule == "delta":
    u = u - _einsum("bhk,bhnskv->bhnsv", k, seen.memory)
  k = k[..., None, None, :]
  written = k[..., :, None] * u[..., None, :]
  if rule == "wedge":
    written = written - jnp.swapaxes(written, -1, -2)
  A = lam[..., None, None] * A + eta[..., None, None] * written
  if z is not None:
    z = lam[..., None] * z + eta[..., None] * k
  return types.Memories(A, z)


def entry(spec, token: types.Window, dtype) -> types.Window:
  """A token as it goes into the memory."""
  token = jax.tree.map(lambda x: x.astype(dtype), token)
  key = unit(token.key) if spec.unit_keys else token.key
  return token._replace(key=key, value=spec.value_scale * token.value)


def _write_evicted(memories, evicted, exists, gates, spec):
  """The memories after the token that left the window, if one did."""
  lam, eta, rho = gates
  k, v, own_rho = entry(spec, evicted, memories.memory.dtype)
  if spec.routes_evicted:
    rho = own_rho
  written = _write(memories, memories, k, v, lam, eta, rho, spec.rule)
  return contract.batched_where(exists, written, memories)


def write_chunk_mean(starts, sums, count, gates):
  """(6) over the tokens of the chunk so far."""
  lam, eta, rho = gates
  count = count.astype(lam.dtype)[:, None, None]
  k, v = sums.key / count, sums.value / count
  return _write(starts, starts, k, v, lam, eta, rho, "outer")


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Attends to the window, reads the memory, and writes.

  Args:
    state: before the token.
    inputs: `[batch, heads, dim]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and `[batch, heads, 2 * value]` in query's
    dtype: y_local, then r.
  """
  dtype = state.memories.memory.dtype
  q = inputs.query.astype(dtype)
  rho, pi, alpha = jax.tree.map(
    lambda x: x.astype(dtype),
    (inputs.write_route, inputs.read_route, inputs.read_mix),
  )
  lam = jnp.exp(inputs.log_decay.astype(dtype))
  gates = lam, inputs.write_rate.astype(dtype), rho

  token = types.Window(
    inputs.key, inputs.value, rho if spec.routes_evicted else None
  )
  held, evicted, exists = window.push(
    state.window, token, state.position, sink_tokens=spec.sink_tokens
  )
  size = {"size": spec.window_size, "sink_tokens": spec.sink_tokens}
  live = window.held(state.position + 1, **size) >= 0
  y_local = _local_attention(q, held, live)
  if spec.unit_queries:
    q = unit(q)

  memories, starts, sums = state.memories, state.starts, state.sums
  if starts is None:
    before = memories
    memories = _write_evicted(memories, evicted, exists, gates, spec)
    r = _read(memories if spec.read_after_write else before, q, pi, alpha)
  else:
    phase = state.position % spec.chunk_size
    starts = contract.batched_where(phase == 0, memories, starts)
    r = _read(starts, q, pi, alpha)
    k, v, _ = entry(spec, token, dtype)
    if sums is None:
      memories = _write(memories, starts, k, v, *gates, spec.rule)
    else:
      zeros = jax.tree.map(jnp.zeros_like, sums)
      sums = contract.batched_where(phase == 0, zeros, sums)
      sums = types.Sums(sums.key + k, sums.value + v)
      memories = write_chunk_mean(starts, sums, phase + 1, gates)
    ends = phase + 1 == spec.chunk_size
    starts = contract.batched_where(ends, memories, starts)

  output = jnp.concatenate([y_local, r], axis=-1)
  state = types.State(
    window=held,
    memories=memories,
    starts=starts,
    sums=sums,
    position=state.position + 1,
    segment_id=contract.next_segment_id(state.segment_id),
  )
  return state, output.astype(inputs.query.dtype)


reference = contract.token_scan(step)
