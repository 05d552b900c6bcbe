"""Spec, Inputs and State of Key-Value Means."""

import dataclasses
from typing import Annotated, NamedTuple

import jax

from memcomp_kernels.key_value_means import budgets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a Key-Value Means memory.

  Attributes:
    chunk_size: C, tokens that leave the window together, >= 1.
    window_chunks: n >= 1; the newest n chunks (the current one included) are
      attended to exactly. Nothing is compressed before `window` tokens.
    sink_rows: S, the first rows of the memory, never merged into, in
      [0, chunk_size): the first chunk becomes the first rows.
    rotary_dim: r >= 0, the first channels of a key, zeroed before it enters
      the memory, which knows no positions.
    budget: tokens to rows, see `budgets`. The memory never has fewer rows
      than its first chunk, and never more than its state's capacity.
    max_length: tokens up to which the budget is asked, >= chunk_size; longer
      sequences stay at its last value.
    gate_appends: weigh appended rows by the merge gate as well (the paper
      does not, its first released code did).
    value_radius: read values at the length of the token that began the row;
      if False, the mean: the sum over the number of tokens in the row.
    norm_eps: inside the layer norm of the memory's keys.
    radius_eps: the least length that a value sum is divided by.
  """

  chunk_size: int = 256
  window_chunks: int = 2
  sink_rows: int = 1
  rotary_dim: int = 64
  budget: budgets.Budget = budgets.DEFAULT
  max_length: int = 65536
  gate_appends: bool = False
  value_radius: bool = True
  norm_eps: float = 1e-5
  radius_eps: float = 1e-12

  def __post_init__(self):
    for name in ("chunk_size", "window_chunks"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if not 0 <= self.sink_rows < self.chunk_size:
      raise ValueError(
        f"sink_rows={self.sink_rows} must be at least 0 and less than the"
        f" {self.chunk_size} rows (chunk_size) that the memory starts with:"
        " nothing could be merged"
      )
    if self.rotary_dim < 0:
      raise ValueError(f"rotary_dim={self.rotary_dim} must be at least 0")
    if self.max_length < self.chunk_size:
      raise ValueError(
        f"max_length={self.max_length} must be at least"
        f" chunk_size={self.chunk_size}"
      )
    for name in ("norm_eps", "radius_eps"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")
    try:
      hash(self.budget)
    except TypeError:
      raise ValueError(f"budget={self.budget!r} must be hashable") from None
    budgets.table(self.budget, self.chunk_size, self.max_length)

  @property
  def window(self) -> int:
    """L, the tokens of the window."""
    return self.window_chunks * self.chunk_size

  @property
  def limits(self) -> tuple[int, ...]:
    """The budget at chunk_size, 2 chunk_size, ... tokens."""
    return budgets.table(self.budget, self.chunk_size, self.max_length)

  def live_rows(self, chunks: int) -> tuple[int, ...]:
    """The rows while chunk 0, 1, ..., `chunks` is read, by the schedule."""
    return budgets.live_rows(
      self.budget,
      self.chunk_size,
      self.window_chunks,
      self.max_length,
      chunks,
    )


class Inputs(NamedTuple):
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: normalised and rotated.
    key: normalised and rotated.
    value: what is kept.
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
    radii: rho, the length of the value that began each row; without
      `value_radius` the number of tokens in the row.
    length: rows that are live, the first ones.
    window_keys: keys of the newest tokens; that at position p stands at p mod
      window.
    window_values: their values.
    window_gates: their merge gates.
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
