"""Spec, Inputs and State of Tensor Cache."""

import dataclasses
import math
from typing import Annotated, NamedTuple

import jax

from memcomp_kernels.shapes import If

RULES = ("outer", "delta", "wedge")
WRITE_POPULATIONS = ("all", "evicted")
ROUTE_BY = ("key", "query")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a Tensor Cache: changing a field changes the function.

  Attributes:
    window_size: W, tokens that are attended to exactly, the current one
      included, >= 1.
    sink_tokens: of them, the first ones of a segment that never leave, in
      [0, window_size).
    rule: what is written: "outer" (3), "delta" (4) or "wedge" (14, which needs
      key_dim == value_dim).
    write_population: which tokens are written. "all": every token, at the end
      of its chunk, and tokens read the memory at their chunk's start (the
      paper's training forward). "evicted": a token as it leaves the window
      (the paper's streaming step).
    chunk_size: tokens a chunk, >= 1, with "all"; ignored by "evicted". Of one
      longer than the window (the paper's Table 4 has such) tokens are out of
      sight between their leaving the window and the chunk's end.
    chunk_mean: the shortcut (6): a chunk writes the outer product of its mean
      key and mean value, once. It is another function, kept as an ablation;
      only with "all", "outer" and one slot.
    num_slots: memories side by side that writes and reads are routed to
      (10)-(12), >= 1.
    timescales: 1, or 2 for a fast and a slow memory (13).
    route_by: whose route an evicted token takes to a slot: its own ("key") or
      that of the token that evicts it ("query"). With "all" they are the same.
    read_after_write: an evicted token is read by the token that evicts it; if
      False (the public code's order) by the next one on. Only with "evicted".
    unit_keys: k / (|k| + 1e-5) on its way into the memory; local attention
      has keys and queries as they come.
    unit_queries: the same of the query that reads the memory.
    value_scale: factor of values on their way into the memory, > 0.
    read_norm: reads are divided by max(|q . z|, 1), z_t = lambda z_{t-1} +
      eta k: each slot and timescale by its own z.
  """

  window_size: int = 512
  sink_tokens: int = 0
  rule: str = "outer"
  write_population: str = "all"
  chunk_size: int = 64
  chunk_mean: bool = False
  num_slots: int = 1
  timescales: int = 1
  route_by: str = "key"
  read_after_write: bool = False
  unit_keys: bool = False
  unit_queries: bool = False
  value_scale: float = 1.0
  read_norm: bool = False

  def __post_init__(self):
    for name, choices in (
      ("rule", RULES),
      ("write_population", WRITE_POPULATIONS),
      ("route_by", ROUTE_BY),
    ):
      if getattr(self, name) not in choices:
        raise ValueError(
          f"{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}"
        )
    for name in ("window_size", "chunk_size", "num_slots"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if not 0 <= self.sink_tokens < self.window_size:
      raise ValueError(
        f"sink_tokens={self.sink_tokens} must be in"
        f" [0, window_size={self.window_size})"
      )
    if self.timescales not in (1, 2):
      raise ValueError(f"timescales={self.timescales} must be 1 or 2")
    if not (self.value_scale > 0 and math.isfinite(self.value_scale)):
      raise ValueError(f"value_scale={self.value_scale} must be positive")
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
    """Whether every token is written, and read from chunk to chunk."""
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
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: of local attention and of the memory.
    key: of local attention and of the memory.
    value: of local attention and of the memory.
    log_decay: log lambda <= 0 of every timescale, the fast one first.
    write_rate: eta >= 0 of every timescale.
    write_route: rho in [0, 1], one-hot where a token is written to one slot;
      None with one slot.
    read_route: pi in [0, 1]; None with one slot.
    read_mix: alpha of (13); None with one timescale.
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
  """The arrays that writes go to.

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
    key: of keys.
    value: of values.
  """

  key: Annotated[jax.Array, "batch heads key_dim"]
  value: Annotated[jax.Array, "batch heads value_dim"]


class Window(NamedTuple):
  """The last tokens, in rows as `window` lays them.

  Attributes:
    key: as they came.
    value: as they came.
    write_route: where an evicted token takes its own route to a slot; None
      otherwise.
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
    starts: `memories` at the start of the current chunk, what is read; equal
      to `memories` (and never read) between two chunks; only with
      write_population "all", None otherwise.
    sums: of the current chunk; only with `chunk_mean`, None otherwise.
    position: tokens of the segment so far.
    segment_id: the current segment, 0 before any token.
  """

  window: Window
  memories: Memories
  starts: Annotated[Memories | None, If("chunked")]
  sums: Annotated[Sums | None, If("chunk_mean")]
  position: Annotated[jax.Array, "batch", "int32"]
  segment_id: Annotated[jax.Array, "batch", "int32"]
