"""Sizes and gates that the kernels of affine memories over tokens share.

The kernels read and write tokens in their memory layout, `[batch, time, heads *
dim]`. A unit is a few heads side by side on lanes (see `blocks`). Either each
head of a unit has its own queries and keys, or all share the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

COARSE = "a_coarse", "b_coarse"
"""Gates without adjoints: the parts of `decay.Sums` that have no adjoint.

Kernels that read within a tile have them if `Plan.two_parts`; "a" and "b" are
then the fine parts.
"""

TERMS = 3
"""Number of bfloat16 terms whose sum is a float32."""


class TileKernel(NamedTuple):
  """How a memory's tile is computed; pairs are (forward, backward).

  Attributes:
    name: Name of the kernel.
    pieces: Functions of a `tile.UnitTile`, each a `schedule.Piece`.
    schedules: Pairs (number of units in lock step, stages between two such
      groups). Static cycle counts chose them (docs/tpu-kernels.md).
    step_tiles: Maximum tiles per grid step; None if only `engine.STEP_TOKENS`
      limits them.
    factors_decays: Whether the kernel factors the decays itself. Its gates are
      then `log_decay` and `rate`, its memory is `[batch, heads, value, key]`,
      and it reports its lowest sum of log decays (`UnitTile.note_lowest`).
      Below `form.LOWEST_SUM` the XLA form computes the call again.
    options: Options of the memory that the pieces read.
  """

  name: str
  pieces: tuple[Callable[..., Any], Callable[..., Any]]
  schedules: tuple[tuple[int, int], tuple[int, int]]
  step_tiles: tuple[int, int] | None = None
  factors_decays: bool = False
  options: Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """A kernel's sizes and options, without the lengths of its operands.

  Attributes:
    heads: Heads of all memories.
    shared: Number of consecutive heads that share a query and a key.
    key_dim: Width of keys.
    value_dim: Width of values.
    tile: Tokens per tile.
    read: Writes that a token r reads: "after" (tokens i <= r), "before"
      (i < r), or "start" (only those before the chunk).
    dtype: Dtype of outputs.
    erase: Whether a token first removes what its key reads.
    scale: Factor of outputs; 1 unless `erase`.
    skip: Whether a multiple of the value is added to outputs; never with
      `erase`.
    unit: Heads side by side on lanes; it divides `shared` unless that is 1.
    step_units: Units per grid step. Their heads are whole groups or part of one
      group.
    step_tiles: Tiles per grid step.
    two_parts: Whether sums of log decays have the two parts of `decay.Sums`.
      Products of float32 need them. Those of bfloat16 do not: a factor's
      rounding to bfloat16 errs by 2e-3, the difference of two sums of one part
      by at most 5e-4 in tiles of 64 tokens, where all decays are strongest.
    kernel: What computes a tile.
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
  two_parts: bool
  kernel: TileKernel

  @property
  def units(self) -> int:
    """Number of units of all heads."""
    return self.heads // self.unit

  @property
  def steps(self) -> int:
    """Number of grid steps over heads."""
    return self.units // self.step_units

  @property
  def step_tokens(self) -> int:
    """Tokens per grid step."""
    return self.tile * self.step_tiles

  @property
  def gate_lanes(self) -> int:
    """Lanes per row of gates."""
    return self.unit * self.tile

  @property
  def gate_rows(self) -> int:
    """Rows of a grid step's gates: one per unit and tile, a multiple of 8."""
    return -(-self.step_units * self.step_tiles // 8) * 8

  @property
  def inner(self) -> bool:
    """Whether tokens read what tokens of their own tile write."""
    return self.read != "start"

  @property
  def gates(self) -> tuple[str, ...]:
    """Names of the gates. All are by token; only `total` is by value."""
    if self.kernel.factors_decays:
      return "log_decay", "rate"
    coarse = COARSE if self.two_parts else ()
    inner = ("a", "b", "rate", *coarse) if self.inner else ()
    return ("write", "total", *inner, *(("skip",) if self.skip else ()))

  @property
  def columns(self) -> tuple[str, ...]:
    """Names of gates that kernels also need with tokens on sublanes."""
    if self.kernel.factors_decays:
      return self.gates
    return ("write", *self.sums("a")) if self.inner else ("write",)

  def sums(self, name: str) -> tuple[str, ...]:
    """Returns the gates that add up to "a" or "b", the coarse part first."""
    return (f"{name}_coarse", name) if self.two_parts else (name,)

  @property
  def column_rows(self) -> int:
    """Rows of the result of `split` for a tile."""
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
    """Number of grid steps over which a group of heads is spread."""
    return max(1, self.shared // (self.step_units * self.unit))

  @property
  def step_keys(self) -> int:
    """Lanes of a grid step's queries or keys."""
    heads = self.step_units * self.unit
    return max(1, heads // self.shared) * self.key_dim

  def key_place(self, unit: int) -> int:
    """Returns the first lane of a unit's queries and keys in its grid step."""
    return unit * self.unit // self.shared * self.key_dim


def split(plan: Plan, gates: dict[str, jax.Array]) -> jax.Array:
  """Splits gates `[..., Plan.gate_rows, Plan.gate_lanes]` into bfloat16 terms.

  Kernels transpose the terms and spread them over lanes.

  Returns:
    bfloat16 `[..., tiles, Plan.column_rows, tile]`; rows are ordered by gate,
    term, unit and head.
  """
  terms = []
  for name in plan.columns:
    x = gates[name][..., : plan.step_tiles * plan.step_units, :]
    sizes = plan.step_tiles, plan.step_units * plan.unit, plan.tile
    x = x.reshape(*x.shape[:-2], *sizes)
    for _ in range(TERMS):
      # Not a pair of casts: XLA may take such a pair for the identity.
      term = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
      terms.append(term.astype(jnp.bfloat16))
      x = x - term
  x = jnp.concatenate(terms, axis=-2)
  free = plan.column_rows - x.shape[-2]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, free), (0, 0)])
