"""What kernels of affine memories over tokens share: sizes and gates.

Tokens are read and written as they lie in memory, `[batch, time, heads *
dim]`. A unit is a few heads side by side on lanes (`blocks`); each has its own
queries and keys, or all share one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Flags of a tile: it starts a segment, goes on with a chunk that came in, holds
# its row's last chunk, ends a chunk.
RESETS, CONTINUES, LAST, COMPLETE = 1, 2, 4, 8

COARSE = "a_coarse", "b_coarse"
"""Gates without adjoints: the parts of `decay.Sums` that have none."""

TERMS = 3
"""A float32 is the sum of as many bfloat16."""


class Own(NamedTuple):
  """A kernel that a memory brings; its gates are `log_decay` and `rate`.

  The memory is `[batch, heads, value, key]` there, and the kernel says by
  `Tile.note_lowest` how far its decays went.

  Attributes:
    name: of the kernel.
    pieces: a module with `forward` and `backward`.
    spec: the memory's meaning.
    schedules: as `engine.SCHEDULES`.
    step_tiles: of a grid step, at most, forward and backward.
  """

  name: str
  pieces: Any
  spec: Any
  schedules: tuple[tuple[int, int], tuple[int, int]]
  step_tiles: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A kernel, but for the lengths of its operands.

  Attributes:
    heads: of all memories.
    shared: heads, which follow each other, that share a query and a key.
    key_dim: width of keys.
    value_dim: width of values.
    tile: tokens.
    read: "after" (i <= r), "before" (i < r) or "start".
    dtype: of outputs.
    erase: whether a token first takes out what its key reads.
    scale: of outputs; 1 unless `erase`.
    skip: whether outputs have a share of the value added; not with `erase`.
    unit: heads side by side; divides `shared` unless that is 1.
    step_units: of a grid step, whose heads are whole groups or part of one.
    step_tiles: of a grid step.
    group: units emitted in lock step.
    skew: stages between two groups.
    own: the memory's own kernel; None for those of this folder.
  """

  heads: int
  shared: int
  key_dim: int
  value_dim: int
  tile: int
  read: str
  dtype: Any
  erase: bool
  scale: float
  skip: bool
  unit: int
  step_units: int
  step_tiles: int
  group: int
  skew: int
  own: Own | None = None

  @property
  def units(self) -> int:
    """Of all heads."""
    return self.heads // self.unit

  @property
  def steps(self) -> int:
    """Grid steps over heads."""
    return self.units // self.step_units

  @property
  def tokens(self) -> int:
    """Of a grid step."""
    return self.tile * self.step_tiles

  @property
  def lanes(self) -> int:
    """Of a row of gates."""
    return self.unit * self.tile

  @property
  def rows(self) -> int:
    """Of a grid step's gates, a row for each unit of each tile."""
    return -(-self.step_units * self.step_tiles // 8) * 8

  @property
  def inner(self) -> bool:
    """Whether tokens read what their tile writes."""
    return self.read != "start"

  @property
  def gates(self) -> tuple[str, ...]:
    """Names of the rows of numbers by token, and of `total`, by value."""
    if self.own:
      return "log_decay", "rate"
    inner = ("a", "b", "rate", *COARSE) if self.inner else ()
    return ("write", "total", *inner, *(("skip",) if self.skip else ()))

  @property
  def columns(self) -> tuple[str, ...]:
    """Names of the gates that kernels also need with tokens on sublanes."""
    if self.own:
      return self.gates
    return ("write", "a", "a_coarse") if self.inner else ("write",)

  @property
  def column_rows(self) -> int:
    """Of `split` of a tile."""
    rows = TERMS * len(self.columns) * self.step_units * self.unit
    return -(-rows // 16) * 16

  @property
  def key_width(self) -> int:
    """Lanes of a unit's queries or keys."""
    return self.key_dim * (self.unit if self.shared == 1 else 1)

  @property
  def value_width(self) -> int:
    """Lanes of a unit's values."""
    return self.value_dim * self.unit

  @property
  def key_parts(self) -> int:
    """How many grid steps each group of heads is spread over."""
    return max(1, self.shared // (self.step_units * self.unit))

  @property
  def step_keys(self) -> int:
    """Lanes of a grid step's queries or keys."""
    heads = self.step_units * self.unit
    return max(1, heads // self.shared) * self.key_dim

  def key_place(self, unit: int) -> int:
    """The first lane of a unit's queries and keys in its grid step."""
    return unit * self.unit // self.shared * self.key_dim


def split(plan: Plan, gates: dict[str, jax.Array]) -> jax.Array:
  """Gates `[..., Plan.rows, Plan.lanes]` as kernels turn and spread them.

  Returns:
    `[..., tiles, Plan.column_rows, tile]`, bfloat16: by gate, term, unit, head.
  """
  terms = []
  for name in plan.columns:
    x = gates[name][..., : plan.step_tiles * plan.step_units, :]
    sizes = plan.step_tiles, plan.step_units * plan.unit, plan.tile
    x = x.reshape(*x.shape[:-2], *sizes)
    for _ in range(TERMS):
      term = x.astype(jnp.bfloat16)
      terms.append(term)
      x = x - term.astype(x.dtype)
  x = jnp.concatenate(terms, axis=-2)
  free = plan.column_rows - x.shape[-2]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, free), (0, 0)])
