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

The prediction k A of (4) uses A before its decay. `write_population` determines
what is written and when it is read; see docs/tensor_cache.md.
"""

import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, shapes, window
from memcomp_kernels.options import at_least, one_of, option, options, positive
from memcomp_kernels.shapes import If

RULES = ("outer", "delta", "wedge")
WRITE_POPULATIONS = ("all", "evicted")
ROUTE_BY = ("key", "query")


@options
class Spec:
  """The options of a Tensor Cache; changing a field changes the function.

  Attributes:
    window_size: W, tokens that are attended to exactly, the current one
      included, >= 1.
    sink_tokens: how many of them are first tokens of a segment that never
      leave the window, in [0, window_size).
    rule: what is written, "outer" (3), "delta" (4) or "wedge" (14). The wedge
      requires key_dim == value_dim.
    write_population: which tokens are written. "all" writes every token at the
      end of its chunk, and tokens read the memory at their chunk's start (the
      paper's training forward). "evicted" writes a token when it leaves the
      window (the paper's streaming step).
    chunk_size: tokens per chunk, >= 1, with "all"; ignored by "evicted". If a
      chunk is longer than the window (as in the paper's Table 4), nothing can
      read a token between its leaving the window and the chunk's end.
    chunk_mean: whether to use the shortcut (6), where a chunk writes the outer
      product of its mean key and mean value once. It is another function, kept
      as an ablation. It requires "all", "outer" and one slot.
    num_slots: number of parallel memories to which writes and reads are routed
      (10)-(12), >= 1.
    timescales: 1, or 2 for a fast and a slow memory (13).
    route_by: whose route an evicted token takes to a slot, its own ("key") or
      that of the token that evicts it ("query"). With "all" they are the same.
    read_after_write: whether the token that evicts a token reads it. If False
      (the public code's order), the next token is the first to read it. Only
      with "evicted".
    unit_keys: whether the memory receives keys as k / (|k| + 1e-5). Local
      attention uses keys and queries unchanged.
    unit_queries: whether the memory is read with queries as q / (|q| + 1e-5).
    value_scale: factor of values that enter the memory, > 0.
    read_norm: whether reads are divided by max(|q . z|, 1), z_t = lambda
      z_{t-1} + eta k. Each slot and timescale has its own z.
  """

  window_size: int = option(512, at_least(1))
  sink_tokens: int = 0
  rule: str = option("outer", one_of(RULES))
  write_population: str = option("all", one_of(WRITE_POPULATIONS))
  chunk_size: int = option(64, at_least(1))
  chunk_mean: bool = False
  num_slots: int = option(1, at_least(1))
  timescales: int = 1
  route_by: str = option("key", one_of(ROUTE_BY))
  read_after_write: bool = False
  unit_keys: bool = False
  unit_queries: bool = False
  value_scale: float = option(1.0, positive)
  read_norm: bool = False

  def __post_init__(self):
    if not 0 <= self.sink_tokens < self.window_size:
      raise ValueError(
        f"sink_tokens={self.sink_tokens} must be in"
        f" [0, window_size={self.window_size})"
      )
    if self.timescales not in (1, 2):
      raise ValueError(f"timescales={self.timescales} must be 1 or 2")
    if self.chunked and self.read_after_write:
      raise ValueError(
        'read_after_write=True must go with write_population="evicted": with'
        ' "all", tokens read the memory at their chunk\'s start'
      )
    if self.chunk_mean and not (
      self.chunked and self.rule == "outer" and self.num_slots == 1
    ):
      raise ValueError(
        'chunk_mean=True must go with write_population="all", rule="outer" and'
        " num_slots=1"
      )

  @property
  def chunked(self) -> bool:
    """Whether tokens of a chunk share the memory at its start."""
    return self.write_population == "all"

  @property
  def routed(self) -> bool:
    """Whether tokens are routed to slots."""
    return self.num_slots > 1

  @property
  def routes_evicted(self) -> bool:
    """Whether the window keeps the routes of its tokens."""
    return self.routed and not self.chunked and self.route_by == "key"


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: query of local attention and of the memory.
    key: key of local attention and of the memory.
    value: value of local attention and of the memory.
    log_decay: log lambda <= 0 of every timescale, the fast one first.
    write_rate: eta >= 0 of every timescale.
    write_route: rho in [0, 1], one-hot where a token is written to one slot.
      None with one slot.
    read_route: pi in [0, 1]. None with one slot.
    read_mix: alpha of (13). None with one timescale.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads timescales"]
  write_rate: Annotated[jax.Array, "batch time heads timescales"]
  write_route: Annotated[
    jax.Array | None, "batch time heads num_slots", If("routed")
  ] = None
  read_route: Annotated[
    jax.Array | None, "batch time heads num_slots", If("routed")
  ] = None
  read_mix: Annotated[
    jax.Array | None, "batch time heads 1", If("timescales", 2)
  ] = None


class Memories(NamedTuple):
  """The arrays that tokens are written to.

  Attributes:
    memory: A.
    normalizer: z; None without `read_norm`.
  """

  memory: Annotated[
    jax.Array, "batch heads timescales num_slots key_dim value_dim"
  ]
  normalizer: Annotated[
    jax.Array | None,
    "batch heads timescales num_slots key_dim",
    If("read_norm"),
  ]


class Sums(NamedTuple):
  """Sums over the tokens of the current chunk; never read between two chunks.

  Attributes:
    key: sum of keys.
    value: sum of values.
  """

  key: Annotated[jax.Array, "batch heads key_dim"]
  value: Annotated[jax.Array, "batch heads value_dim"]


class Window(NamedTuple):
  """The last tokens, in the rows of a `window`.

  Attributes:
    key: keys as they came.
    value: values as they came.
    write_route: write routes, if an evicted token takes its own route to a
      slot; None otherwise.
  """

  key: Annotated[jax.Array, "batch heads window_size key_dim"]
  value: Annotated[jax.Array, "batch heads window_size value_dim"]
  write_route: Annotated[
    jax.Array | None,
    "batch heads window_size num_slots",
    If("routes_evicted"),
  ]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    window: the last tokens.
    memories: what has been written so far.
    starts: `memories` at the start of the current chunk, which tokens read. It
      equals `memories` and is never read between two chunks. It exists only
      with write_population "all", and is None otherwise.
    sums: sums over the current chunk. They exist only with `chunk_mean`, and
      are None otherwise.
    position: tokens of the segment so far.
    segment_id: the current segment, 0 before any token.
  """

  window: Window
  memories: Memories
  starts: Annotated[Memories | None, If("chunked")]
  sums: Annotated[Sums | None, If("chunk_mean")]
  position: Annotated[jax.Array, "batch", "int32"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


NORM_EPS = 1e-5


def unit(x: jax.Array) -> jax.Array:
  """Returns x / (|x| + 1e-5) over the last axis; zero gradient at zero."""
  square = jnp.sum(x * x, axis=-1, keepdims=True)
  zero = square == 0
  norm = jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))
  return x / (norm + NORM_EPS)


def _local_attention(q, held, live):
  """Computes (1): q `[b, h, d]` over the rows that are `live`, `[b, W]`."""
  scores = contract.einsum("bhd,bhwd->bhw", q, held.key)
  scores = scores / math.sqrt(q.shape[-1])
  scores = jnp.where(live[:, None], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1)
  return contract.einsum("bhw,bhwe->bhe", weights, held.value)


def _read(memories: Memories, q, pi, alpha):
  """Computes (2), (12), (13): r = sum over timescales and slots."""
  A, z = memories
  r = contract.einsum("bhk,bhnskv->bhnsv", q, A)
  if z is not None:
    along = contract.einsum("bhk,bhnsk->bhns", q, z)
    r = r / jnp.maximum(jnp.abs(along), 1)[..., None]
  if pi is not None:
    r = r * pi[..., None, :, None]
  r = jnp.sum(r, axis=-2)
  if alpha is None:
    return r[..., 0, :]
  return r[..., 0, :] + alpha * r[..., 1, :]


def _write(memories, seen, k, v, lam, eta, rho, rule):
  """Applies (3), (4) or (14) to every slot; (4) predicts from `seen`."""
  A, z = memories
  lam, eta = lam[..., None], eta[..., None]
  if rho is not None:
    rho = rho[..., None, :]
    lam, eta = 1 + rho * (lam - 1), rho * eta
  u = v[..., None, None, :]  # over timescales and slots
  if rule == "delta":
    u = u - contract.einsum("bhk,bhnskv->bhnsv", k, seen.memory)
  k = k[..., None, None, :]
  written = k[..., :, None] * u[..., None, :]
  if rule == "wedge":
    written = written - jnp.swapaxes(written, -1, -2)
  A = lam[..., None, None] * A + eta[..., None, None] * written
  if z is not None:
    z = lam[..., None] * z + eta[..., None] * k
  return Memories(A, z)


def entry(spec, token: Window, dtype) -> Window:
  """Returns a token as it enters the memory."""
  token = jax.tree.map(lambda x: x.astype(dtype), token)
  key = unit(token.key) if spec.unit_keys else token.key
  return token._replace(key=key, value=spec.value_scale * token.value)


def _write_evicted(memories, evicted, exists, gates, spec):
  """Returns the memories after the evicted token, if there was one."""
  lam, eta, rho = gates
  k, v, own_rho = entry(spec, evicted, memories.memory.dtype)
  if spec.routes_evicted:
    rho = own_rho
  written = _write(memories, memories, k, v, lam, eta, rho, spec.rule)
  return contract.batched_where(exists, written, memories)


def write_chunk_mean(starts, sums, count, gates):
  """Applies (6) to the tokens of the chunk so far."""
  lam, eta, rho = gates
  count = count.astype(lam.dtype)[:, None, None]
  k, v = sums.key / count, sums.value / count
  return _write(starts, starts, k, v, lam, eta, rho, "outer")


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Attends to the window, reads the memory, and writes.

  Args:
    state: the state before the token.
    inputs: `[batch, heads, dim]` arrays.
    spec: the memory's options.

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

  token = Window(inputs.key, inputs.value, rho if spec.routes_evicted else None)
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
      sums = Sums(sums.key + k, sums.value + v)
      memories = write_chunk_mean(starts, sums, phase + 1, gates)
    ends = phase + 1 == spec.chunk_size
    starts = contract.batched_where(ends, memories, starts)

  output = jnp.concatenate([y_local, r], axis=-1)
  state = State(
    window=held,
    memories=memories,
    starts=starts,
    sums=sums,
    position=state.position + 1,
    segment_id=contract.next_segment_id(state.segment_id),
  )
  return state, output.astype(inputs.query.dtype)


def check(spec: Spec, sizes: shapes.Sizes, state: State | None) -> None:
  """Raises ValueError if widths differ that "wedge" needs equal."""
  del state
  key_dim, value_dim = sizes.get("key_dim"), sizes.get("value_dim")
  if spec.rule == "wedge" and key_dim != value_dim:
    raise ValueError(
      f'tensor_cache: rule="wedge" needs key_dim={key_dim} and'
      f" value_dim={value_dim} equal"
    )
