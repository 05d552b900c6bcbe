"""Key-Value Means token by token (arXiv 2605.09877v3).

Symbols: sK, sV, rho are the rows of the memory (sums of keys, sums of values,
radii), and m counts those that are live. k, v, g are key, value and merge gate
of a token. C = chunk_size, L = window, S = sink_rows, B is the budget, and e
the position of a chunk's first token.

  prepared key   kbar = LN_s([0_r, k_{r:}])                          eq. (1)
  gate           g, a weight > 0: k' = g kbar, v' = g v           eq. (2)-(4)
  first rows     at e = L: sK_i = kbar_i, sV_i = v_i, rho_i = |v_i|, i < C

When a later chunk begins, the oldest chunk of the window leaves it ("Append"
and "Merge"). With M = max(m, min(B(e), tokens outside the window, capacity)),
the min(M - m, C) tokens of least max_i <kbar_j, LN_s(sK_i)> become rows

  sK = kbar_j,   sV = v_j,   rho = |v_j|

and each of the other tokens joins the row of greatest <kbar_j, LN_s(sK_i)>,
including the new rows and excluding the first S:

  sK_i += g_j kbar_j,   sV_i += g_j v_j

A token then attends with one softmax to the rows and to the tokens of the
window up to itself ("Readout"). The window begins at a chunk boundary:

  K^A = [tau_state LN_s(sK) ; tau_window k],   V^A = [rho sV / |sV| ; v]
  y = softmax(q K^A^T / sqrt(d)) V^A

The choice of rows has no gradient. The code below handles one head at a time.
"""

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.key_value_means import budgets
from memcomp_kernels.math import activations
from memcomp_kernels.options import at_least, option, options, positive


@options
class Spec:
  """The options of a Key-Value Means memory.

  Attributes:
    chunk_size: C, tokens that leave the window together, >= 1.
    window_chunks: n >= 1. Tokens attend exactly to the newest n chunks, the
      current one included. Nothing is compressed before `window` tokens.
    sink_rows: S, number of first rows of the memory that nothing is merged
      into, in [0, chunk_size). The first chunk becomes the first rows.
    rotary_dim: r >= 0, number of first channels of a key that are set to zero
      before it enters the memory, which knows no positions.
    budget: function from tokens to rows, such as `budgets.FixedBudget(256)` of
      `memcomp_kernels.key_value_means.budgets`. The memory never has
      fewer rows than its first chunk, and never more than its state's capacity.
    max_length: largest number of tokens for which the budget is evaluated, >=
      chunk_size. Longer sequences keep its last value.
    gate_appends: whether the merge gate also weighs appended rows. The paper
      does not do this; its first released code did.
    value_radius: whether to scale a value that is read to the length of the
      token that began its row. If False, the value is the mean, the sum over
      the number of tokens in the row.
    norm_eps: eps inside the layer norm of the memory's keys.
    radius_eps: the least length that a value sum is divided by.
  """

  chunk_size: int = option(256, at_least(1))
  window_chunks: int = option(2, at_least(1))
  sink_rows: int = 1
  rotary_dim: int = option(64, at_least(0))
  budget: budgets.Budget = budgets.DEFAULT
  max_length: int = 65536
  gate_appends: bool = False
  value_radius: bool = True
  norm_eps: float = option(1e-5, positive)
  radius_eps: float = option(1e-12, positive)

  def __post_init__(self):
    if not 0 <= self.sink_rows < self.chunk_size:
      raise ValueError(
        f"sink_rows={self.sink_rows} must be at least 0 and less than the"
        f" {self.chunk_size} rows (chunk_size) that the memory starts with:"
        " nothing could be merged"
      )
    if self.max_length < self.chunk_size:
      raise ValueError(
        f"max_length={self.max_length} must be at least"
        f" chunk_size={self.chunk_size}"
      )
    try:
      hash(self.budget)
    except TypeError:
      raise ValueError(f"budget={self.budget!r} must be hashable") from None
    budgets.table(self.budget, self.chunk_size, self.max_length)

  @property
  def window(self) -> int:
    """L, the number of tokens in the window."""
    return self.window_chunks * self.chunk_size

  @property
  def limits(self) -> tuple[int, ...]:
    """The budget at chunk_size, 2 chunk_size, ... tokens."""
    return budgets.table(self.budget, self.chunk_size, self.max_length)

  def live_rows(self, chunks: int) -> tuple[int, ...]:
    """Returns the rows while chunk 0, 1, ..., `chunks` is read."""
    return budgets.live_rows(
      self.budget,
      self.chunk_size,
      self.window_chunks,
      self.max_length,
      chunks,
    )


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: normalised and rotated query.
    key: normalised and rotated key.
    value: the value to keep.
    merge_gate: g > 0, the token's weight in a merge.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  merge_gate: Annotated[jax.Array, "batch time heads 1"]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  It has room for `rows` rows, its capacity.

  Attributes:
    keys: sK, sums of keys.
    values: sV, sums of values.
    radii: rho, the length of the value that began each row. Without
      `value_radius` it is the number of tokens in the row.
    length: number of live rows, which are the first ones.
    window_keys: keys of the newest tokens. The key at position p is in row p
      mod window.
    window_values: values of the newest tokens.
    window_gates: merge gates of the newest tokens.
    position: tokens of the current segment so far.
    temperatures: (tau_state, tau_window), which no token changes.
    norm_scale: weight of LN_s, which no token changes.
    norm_bias: bias of LN_s, which no token changes.
    segment_id: the current segment, 0 before any token.
  """

  keys: Annotated[jax.Array, "batch heads rows key_dim"]
  values: Annotated[jax.Array, "batch heads rows value_dim"]
  radii: Annotated[jax.Array, "batch heads rows"]
  length: Annotated[jax.Array, "batch", "int32"]
  window_keys: Annotated[jax.Array, "batch heads window key_dim"]
  window_values: Annotated[jax.Array, "batch heads window value_dim"]
  window_gates: Annotated[jax.Array, "batch heads window"]
  position: Annotated[jax.Array, "batch", "int32"]
  temperatures: Annotated[jax.Array, "batch heads 2"]
  norm_scale: Annotated[jax.Array, "batch heads key_dim"]
  norm_bias: Annotated[jax.Array, "batch heads key_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


# The definition does not round float32 to bfloat16, as TPUs do by default.
_dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)


def normed(
  x: jax.Array, *, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """Applies LN_s over the last axis; `scale` and `bias` broadcast with `x`."""
  return activations.layer_norm(x, eps) * scale + bias


def length(x: jax.Array) -> jax.Array:
  """Returns the L2 norm over the last axis, with zero gradient at zero."""
  squared = jnp.sum(x * x, axis=-1)
  some = squared > 0
  return jnp.where(some, jnp.sqrt(jnp.where(some, squared, 1)), 0)


def _new_rows(k_bar, v, spec: Spec):
  """Returns the rows (sK, sV, rho) that tokens would begin."""
  rho = length(v) if spec.value_radius else jnp.ones_like(v[..., 0])
  return k_bar, v, rho


def _overflow(memory, block, m, n_app, layer_norm, spec: Spec):
  """Appends `n_app` tokens of the block to one head's rows; merges the rest."""
  sK, sV, rho = memory
  k_bar, v, g = block
  row = jnp.arange(sK.shape[0])

  def similarity(live, sK):
    scores = _dot(k_bar, layer_norm(sK).T)
    return lax.stop_gradient(jnp.where(live, scores, -jnp.inf))

  def collect(which, x):
    """Sums in row i the x_j of the tokens j for which which[j, i] is true."""
    return _dot(which.T.astype(x.dtype), x)

  # Append the tokens that are least similar to the memory.
  order = jnp.argsort(jnp.max(similarity(row < m, sK), axis=1), stable=True)
  rank = jnp.argsort(order)[:, None]
  begins = (rank < n_app) & (m + rank == row)
  new = (row >= m) & (row < m + n_app)
  gate = g[:, None] if spec.gate_appends else 1.0
  new_k, new_v, new_rho = _new_rows(gate * k_bar, gate * v, spec)
  sK = jnp.where(new[:, None], collect(begins, new_k), sK)
  sV = jnp.where(new[:, None], collect(begins, new_v), sV)
  rho = jnp.where(new, collect(begins, new_rho), rho)

  # Merge. All other tokens are routed against the same rows.
  may_merge = (row >= spec.sink_rows) & (row < m + n_app)
  nearest = jnp.argmax(similarity(may_merge, sK), axis=1)[:, None]
  joins = (rank >= n_app) & (nearest == row)
  sK = sK + collect(joins, g[:, None] * k_bar)
  sV = sV + collect(joins, g[:, None] * v)
  if not spec.value_radius:
    rho = rho + jnp.sum(joins, axis=0)
  return sK, sV, rho


def _begin_chunk(state: State, spec: Spec) -> State:
  """Moves the oldest chunk of the window into the memory, in all batch rows."""
  C, L = spec.chunk_size, spec.window
  capacity = state.keys.shape[2]
  e, m = state.position, state.length
  first = e == L
  limits = jnp.array(spec.limits, jnp.int32)
  budget = limits[jnp.clip(e // C, 1, len(spec.limits)) - 1]
  most = jnp.maximum(m, jnp.minimum(jnp.minimum(budget, e - L + C), capacity))
  n_app = jnp.minimum(most - m, C)

  def one_head(row, head):
    e, m, n_app, first = row
    sK, sV, rho, window_k, window_v, window_g, scale, bias = head
    layer_norm = functools.partial(
      normed, scale=scale, bias=bias, eps=spec.norm_eps
    )
    k, v, g = (
      lax.dynamic_slice_in_dim(x, e % L, C)
      for x in (window_k, window_v, window_g)
    )
    rotary = jnp.arange(k.shape[1]) < spec.rotary_dim
    k_bar = layer_norm(jnp.where(rotary, 0, k))
    begun = tuple(
      jnp.concatenate([new, x[C:]])
      for x, new in zip((sK, sV, rho), _new_rows(k_bar, v, spec), strict=True)
    )
    continued = _overflow(
      (sK, sV, rho), (k_bar, v, g), m, n_app, layer_norm, spec
    )
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), begun, continued)

  keys, values, radii = jax.vmap(jax.vmap(one_head, (None, 0)))(
    (e, m, n_app, first),
    (
      state.keys,
      state.values,
      state.radii,
      state.window_keys,
      state.window_values,
      state.window_gates,
      state.norm_scale,
      state.norm_bias,
    ),
  )
  length = jnp.where(first, C, m + n_app)
  return state._replace(keys=keys, values=values, radii=radii, length=length)


def _read(q, state: State, spec: Spec):
  """Returns the read of the newest token; q is `[batch, heads, key]`."""
  C, L = spec.chunk_size, spec.window
  p = state.position - 1
  # The newest position that each row of the window may hold.
  held = p[:, None] - (p[:, None] - jnp.arange(L)) % L
  window_start = (p // C + 1) * C - L
  in_window = (held >= window_start[:, None]) & (held >= 0)
  live = jnp.arange(state.keys.shape[2]) < state.length[:, None]

  def one_head(row, head):
    live, in_window = row
    q, sK, sV, rho, window_k, window_v, tau, scale, bias = head
    if spec.value_radius:
      size = jnp.maximum(length(sV), spec.radius_eps)
      sV = rho[:, None] * sV / size[:, None]
    else:
      sV = sV / jnp.where(live, rho, 1)[:, None]
    sK = normed(sK, scale=scale, bias=bias, eps=spec.norm_eps)
    K_A = jnp.concatenate([tau[0] * sK, tau[1] * window_k])
    V_A = jnp.concatenate([sV, window_v])
    scores = _dot(K_A, q) / jnp.sqrt(q.shape[0])
    visible = jnp.concatenate([live, in_window])
    return _dot(jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), V_A)

  return jax.vmap(jax.vmap(one_head, (None, 0)))(
    (live, in_window),
    (
      q,
      state.keys,
      state.values,
      state.radii,
      state.window_keys,
      state.window_values,
      state.temperatures,
      state.norm_scale,
      state.norm_bias,
    ),
  )


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Makes room where a chunk begins, stores a token, reads; see `Op.step`."""
  dtype = state.keys.dtype
  q, k, v, g = (x.astype(dtype) for x in inputs)
  p = state.position
  overflows = (p % spec.chunk_size == 0) & (p >= spec.window)
  state = lax.cond(
    jnp.any(overflows),
    lambda state: contract.batched_where(
      overflows, _begin_chunk(state, spec), state
    ),
    lambda state: state,
    state,
  )
  here = (jnp.arange(spec.window) == p[:, None] % spec.window)[:, None]
  state = state._replace(
    window_keys=jnp.where(here[..., None], k[:, :, None], state.window_keys),
    window_values=jnp.where(
      here[..., None], v[:, :, None], state.window_values
    ),
    window_gates=jnp.where(here, g, state.window_gates),
    position=p + 1,
    segment_id=contract.next_segment_id(state.segment_id),
  )
  return state, _read(q, state, spec).astype(inputs.query.dtype)
