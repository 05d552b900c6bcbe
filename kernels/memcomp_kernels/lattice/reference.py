"""Lattice token by token, as the paper writes it (arXiv 2504.05646 v1).

Symbols: S the memory, its columns s_i the slots; k, v, q inputs; gamma =
write_rate; mu = exp(log_decay); Phi = phi(S) the normalised columns. S' is the
memory at the start of the current chunk, from which Phi, h and c are computed.
If gradients are taken per token, S' = S_{t-1}.

  loss         decoding    |Phi k - v|^2     h = Phi k - v  c = k           (6)
               encoding    |Phi^T v - k|^2   h = v          c = Phi^T v - k (9)
               similarity  -<Phi^T v, k>     h = -v         c = k          (11)
  orthogonal   ds_i = -gamma c_i P(s'_i) h / |s'_i|                        (13)
               P(s) = I - s s^T / |s|^2
  normalized   s_i <- (mu s_i + ds_i) / |mu s_i + ds_i|               (14, 16)
               = beta_i (mu s_i + ds_i), beta_i = (mu^2 + |ds_i|^2)^(-1/2)
  L1 variant   soft-threshold by gamma lambda, before the norm             (18)
  read         y_t = S_t q_t, after the write

"delta" is simpler than the updates above. Its loss is taken on S, and its
gradient ds_i = -gamma c_i h is not projected. gamma absorbs the
factor 2 of the gradients of (6) and (9). Inside a chunk, columns are contracted
by beta and then read. After the last read of the chunk they are thresholded and
renormalised exactly.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import (
  at_least,
  not_negative,
  one_of,
  option,
  options,
)
from memcomp_kernels.shapes import If

OBJECTIVES = ("decoding", "encoding", "similarity")
UPDATES = ("delta", "orthogonal", "normalized")
GRADIENT_AT = ("chunk_start", "token")

# Bound of a squared norm whose inverse root has a finite float32 derivative. A
# column below it has no direction but what rounding gives it. Every rule here
# handles such a column, with finite gradients.
TINY = 1e-20


@options
class Spec:
  """The options of a Lattice memory; changing a field changes the function.

  Attributes:
    num_slots: number of columns m of the memory, >= 1.
    objective: the inner loss, "decoding" |Phi k - v|^2 (eq. 6), "encoding"
      |Phi^T v - k|^2 (eq. 9) or "similarity" -<Phi^T v, k> (eq. 11).
    update: how the gradient is applied. "delta" takes the loss on the memory
      itself, without projection. "orthogonal" (eq. 13) writes along the
      tangent, divided by the column's norm. "normalized" (eq. 14) also
      renormalises columns; this is Lattice. These are the steps of the paper's
      ablation.
    forget_gate: whether to use the L2 variant, eq. 16. If False, `log_decay`
      is ignored.
    sparsity: lambda of the L1 variant, eq. 18, >= 0. Entries are
      soft-thresholded by write_rate * sparsity after a write, before
      renormalisation. 0 turns it off.
    gradient_at: where the loss gradient is taken. "token" takes it at the
      memory before each token, as in the paper. "chunk_start" takes it at the
      memory before the chunk for all tokens of the chunk.
    chunk_size: tokens that share a chunk-start gradient, >= 1. "token" ignores
      it.
  """

  num_slots: int = option(64, at_least(1))
  objective: str = option("decoding", one_of(OBJECTIVES))
  update: str = option("normalized", one_of(UPDATES))
  forget_gate: bool = True
  sparsity: float = option(0.0, not_negative)
  gradient_at: str = option("chunk_start", one_of(GRADIENT_AT))
  chunk_size: int = option(16, at_least(1))

  @property
  def chunked(self) -> bool:
    """Whether tokens of a chunk share the gradient at its start."""
    return self.gradient_at == "chunk_start" and self.chunk_size > 1

  @property
  def unit_columns(self) -> bool:
    """Whether columns are kept on the unit sphere."""
    return self.update == "normalized"

  @property
  def sums_rates(self) -> bool:
    """Whether a chunk's end needs the sum of its write rates."""
    return self.chunked and self.sparsity > 0


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: q, the weights of the slots that are read: y = S q.
    key: k, the latent code of the value.
    value: v, the value that is written.
    log_decay: log mu <= 0. Ignored unless `forget_gate`.
    write_rate: gamma >= 0.
  """

  query: Annotated[jax.Array, "batch time heads num_slots"]
  key: Annotated[jax.Array, "batch time heads num_slots"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1", If("forget_gate")]
  write_rate: Annotated[jax.Array, "batch time heads 1"]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    memory: S. Its columns are the slots. With the "normalized" update they have
      norm 1. With gradients at chunk starts, their norm may reach
      sqrt(tokens) inside a chunk.
    memory_start: S at the start of the current chunk. It equals `memory` and is
      never read while `position` is 0. It exists only with gradients at chunk
      starts, and is None otherwise.
    write_rate_sum: sum of write rates since the chunk started. It exists only
      with gradients at chunk starts and sparsity, and is None otherwise.
    position: tokens since the chunk started, in [0, chunk_size). It exists only
      with gradients at chunk starts, and is None otherwise.
    segment_id: the current segment, 0 before any token.
  """

  memory: Annotated[jax.Array, "batch heads value_dim num_slots"]
  memory_start: Annotated[
    jax.Array | None, "batch heads value_dim num_slots", If("chunked")
  ]
  write_rate_sum: Annotated[jax.Array | None, "batch heads", If("sums_rates")]
  position: Annotated[jax.Array | None, "batch", "int32", If("chunked")]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def squared_norms(S: jax.Array) -> jax.Array:
  """Reduces `[..., value, slots]` to `[..., 1, slots]`."""
  return jnp.sum(S * S, axis=-2, keepdims=True)


def normalize(S: jax.Array, fallback: jax.Array) -> jax.Array:
  """Normalises columns; takes `fallback`'s where a column has no direction."""
  squares = squared_norms(S)
  sized = squares > TINY
  return jnp.where(sized, S * lax.rsqrt(jnp.where(sized, squares, 1)), fallback)


def soft_threshold(S: jax.Array, threshold: jax.Array) -> jax.Array:
  """Moves entries to zero by at most `threshold`; eq. 18's proximal step.

  A column that would become zero stays as it is. A zero column has no
  direction, so no later token could write to it along its tangent.
  """
  smaller = S - jnp.clip(S, -threshold, threshold)
  wiped = jnp.all(smaller == 0, axis=-2, keepdims=True)
  return jnp.where(wiped, S, smaller)


def directions(S: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
  """Returns Phi, at which the loss is taken, and the norms to divide by.

  "delta" takes the loss on S itself, and "normalized" has unit columns.
  """
  ones = jnp.ones_like(S[..., :1, :])
  if spec.update != "orthogonal":
    return S, ones
  squares = squared_norms(S)
  norms = jnp.sqrt(jnp.where(squares > TINY, squares, ones))
  return S / norms, norms


def contraction(mu: jax.Array, squares: jax.Array) -> jax.Array:
  """Returns beta = (mu^2 + |ds|^2)^(-1/2) of eq. 14 with eq. 16.

  It is 1 where nothing of a column remains.

  Args:
    mu: the decay.
    squares: |ds|^2 of tangent writes.
  """
  total = mu * mu + squares
  sized = total > TINY
  return jnp.where(sized, lax.rsqrt(jnp.where(sized, total, 1)), 1)


def finish(
  S: jax.Array,
  fallback: jax.Array,
  rate: jax.Array | None,
  spec: Spec,
) -> jax.Array:
  """Applies what follows a write: the proximal step, then renormalisation.

  Args:
    S: the memory after the write, `[..., value, slots]`.
    fallback: provides the direction of columns that have none.
    rate: `[...]`, sum of write rates since the last call; read only with
      sparsity.
    spec: the memory's options.
  """
  if spec.sparsity and rate is not None:
    S = soft_threshold(S, spec.sparsity * rate[..., None, None])
  return normalize(S, fallback) if spec.unit_columns else S


def loss_factors(
  objective: str, Phi: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns h `[batch, heads, value]` and c `[batch, heads, slots]`.

  The gradient of the loss with respect to Phi is h c^T, without a factor 2.
  """
  if objective == "decoding":
    return einsum("bhdm,bhm->bhd", Phi, k) - v, k
  if objective == "encoding":
    return v, einsum("bhdm,bhd->bhm", Phi, v) - k
  return -v, k


def gradient(S: jax.Array, k: jax.Array, v: jax.Array, spec: Spec) -> jax.Array:
  """Returns the gradient of the loss in S, `[batch, heads, value, slots]`."""
  Phi, norms = directions(S, spec)
  h, c = loss_factors(spec.objective, Phi, k, v)
  h, c = h[..., :, None], c[..., None, :] / norms
  if spec.update != "delta":  # apply P to h, for every column
    h = h - Phi * jnp.sum(Phi * h, axis=-2, keepdims=True)
  return h * c


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  S = state.memory
  q, k, v, log_decay, write_rate = (x.astype(S.dtype) for x in inputs)
  mu, gamma = jnp.exp(log_decay)[..., None], write_rate[..., None]
  state = state._replace(segment_id=contract.next_segment_id(state.segment_id))

  if state.position is None:
    written = mu * S - gamma * gradient(S, k, v, spec)
    S = finish(written, S, write_rate[..., 0], spec)
    state = state._replace(memory=S)
    y = einsum("bhdm,bhm->bhd", S, q)
  else:
    start, rate = state.memory_start, state.write_rate_sum
    start = contract.batched_where(state.position == 0, S, start)
    ds = -gamma * gradient(start, k, v, spec)
    S = mu * S + ds
    if spec.unit_columns:
      S = contraction(mu, squared_norms(ds)) * S
    y = einsum("bhdm,bhm->bhd", S, q)  # before the chunk is finished
    if rate is not None:
      rate = rate + write_rate[..., 0]
    position = (state.position + 1) % spec.chunk_size
    finished = finish(S, start, rate, spec)
    S = contract.batched_where(position == 0, finished, S)
    start = contract.batched_where(position == 0, S, start)
    if rate is not None:
      rate = contract.batched_where(position == 0, jnp.zeros_like(rate), rate)
    state = state._replace(
      memory=S, memory_start=start, write_rate_sum=rate, position=position
    )
  return state, y.astype(inputs.query.dtype)
