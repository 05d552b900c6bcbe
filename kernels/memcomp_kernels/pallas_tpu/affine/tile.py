"""Operations that the bodies of kernels over tokens share: one unit's tile."""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.pallas_tpu import blocks
from memcomp_kernels.pallas_tpu.affine import plan as plan_lib

# exp(_NEVER) is zero.
_NEVER = -1e30


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
  return functools.reduce(operator.add, arrays)


class UnitTile:
  """One tile of one unit: its operands, gates, results and state.

  Attributes:
    plan: Plan of the kernel.
    refs: References of the grid step, by name.
    dtype: Dtype of products.
    flags: Flags of the tile, a scalar; None if no tile is special.
    seen: Writes that a row reads, bool `[tile, unit * tile]`.
    own: The row's own write, bool `[tile, unit * tile]`.
    earlier: Writes before the row, bool `[tile, unit * tile]`.
  """

  def __init__(
    self,
    plan: plan_lib.Plan,
    refs: dict[str, Any],
    kept: dict[Any, Any],
    flags: jax.Array | None,
    i: int,
    u: int,
  ):
    """Takes a tile of a grid step.

    Args:
      plan: Plan of the kernel.
      refs: References by name.
      kept: Cache of values that the tiles of a grid step have in common.
      flags: Flags of the tile.
      i: Index of the tile in the grid step.
      u: Index of the unit in the grid step.
    """
    self.plan, self.refs, self.flags = plan, refs, flags
    self.dtype = refs["query"].dtype
    self._kept, self._i, self._u = kept, i, u
    shape = plan.tile, plan.gate_lanes
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = blocks.lane_in_head(plan.gate_lanes, plan.unit)
    self.own, self.earlier = row == lane, row > lane
    self.seen = self.earlier if plan.read == "before" else row >= lane

  def _gate(self) -> tuple[Any, ...]:
    j = self._i * self.plan.step_units + self._u
    return 0, 0, 0, pl.ds(j, 1)

  def row(self, name: str) -> jax.Array:
    """Returns a gate, `[1, lanes]`."""
    return self.refs[name][self._gate()]

  def store_row(self, name: str, row: jax.Array) -> None:
    """Stores a gate's adjoint."""
    self.refs[f"d_{name}"][self._gate()] = row

  def _once(self, key: Any, make: Callable[[], Any]) -> Any:
    if key not in self._kept:
      self._kept[key] = make()
    return self._kept[key]

  def of_group(self, name: str, make: Callable[[], Any]) -> Any:
    """Returns `make()`, computed once for units that share keys."""
    return self._once((name, self._i, self.plan.key_place(self._u)), make)

  def spread(self, name: str, size: int) -> jax.Array:
    """Spreads a gate by token over lanes, `[tile, unit * size]`.

    The matrix unit does it, because broadcasting a number over all lanes is the
    vector unit's most expensive move.
    """
    plan, u = self.plan, self._u
    columns = self._once(
      ("columns", self._i), lambda: self.refs["columns"][0, 0, 0, self._i].T
    )

    def chooser():
      shape = plan.column_rows, plan.unit * size
      row = lax.broadcasted_iota(jnp.int32, shape, 0)
      heads = plan.step_units * plan.unit
      first = plan.columns.index(name) * plan_lib.TERMS * heads + u * plan.unit
      head = first + blocks.head_blocks(shape[1], plan.unit)
      own = [row == head + n * heads for n in range(plan_lib.TERMS)]
      return functools.reduce(jnp.logical_or, own).astype(jnp.bfloat16)

    return blocks.nn(columns, self._once(("chooser", name, u, size), chooser))

  def sums(self, x: jax.Array) -> jax.Array:
    """Sums `[rows, unit * n]` over each head's lanes, to `[1, unit * rows]`."""
    unit = self.plan.unit
    shape = max(8, unit), x.shape[1]

    def ones():
      row = lax.broadcasted_iota(jnp.int32, shape, 0)
      own = row == blocks.head_blocks(shape[1], unit)
      return own.astype(jnp.bfloat16)

    ones = self._once(("ones", shape), ones)
    found = self._in_terms(lambda term: blocks.nt(ones, term), x)
    return jnp.concatenate([found[h : h + 1] for h in range(unit)], axis=1)

  def spread_sums(self, x: jax.Array, size: int) -> jax.Array:
    """Sums `[rows, unit * n]` over each head's lanes, to `[rows, unit * size]`.

    Each sum fills the `size` lanes of its head.
    """
    unit, width = self.plan.unit, x.shape[1]
    shape = width, unit * size

    def ones():
      shift = (width // unit).bit_length() - 1
      head = lax.broadcasted_iota(jnp.int32, shape, 0) >> shift
      own = head == blocks.head_blocks(shape[1], unit)
      return own.astype(jnp.bfloat16)

    ones = self._once(("spread ones", shape), ones)
    return self._in_terms(lambda term: blocks.nn(term, ones), x)

  def running_sum(self, x: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Sums `[tile, lanes]` over the tokens up to each token.

    If `reverse`, the sums run over the tokens from each token on. Shifts over
    sublanes compute them in float32.
    """
    shift = 1
    while shift < x.shape[0]:
      free = jnp.zeros((shift, x.shape[1]), x.dtype)
      parts = (x[shift:], free) if reverse else (free, x[:-shift])
      x = x + jnp.concatenate(parts, axis=0)
      shift *= 2
    return x

  def _in_terms(self, product: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    """Sums `product` of bfloat16 terms whose sum is approximately `x`.

    The terms hold twice the digits of products if these are bfloat16. They hold
    all digits of `x` if products are float32.
    """
    count = 2 if self.dtype == jnp.bfloat16 else plan_lib.TERMS
    return _sum(map(product, blocks.terms(x, count)))

  def sums_of(self, by_token: jax.Array, by_value: jax.Array) -> jax.Array:
    """Adds the `sums` of `[tile, lanes]` and of `[tile, unit * value]`."""
    if by_token.shape == by_value.shape:
      return self.sums(by_token + by_value)
    return self.sums(by_token) + self.sums(by_value)

  def _place(self, lane: int, width: int):
    tile = self.plan.tile
    return 0, pl.ds(self._i * tile, tile), pl.ds(lane, width)

  def keys(self, name: str) -> jax.Array:
    """Returns queries or keys."""
    plan = self.plan
    return self.refs[name][self._place(plan.key_place(self._u), plan.key_width)]

  def values(self, name: str) -> jax.Array:
    """Returns values, outputs or their adjoints."""
    width = self.plan.value_width
    return self.refs[name][self._place(self._u * width, width)]

  def store_values(self, name: str, x: jax.Array) -> None:
    """Stores an array by value."""
    ref, width = self.refs[name], self.plan.value_width
    ref[self._place(self._u * width, width)] = x.astype(ref.dtype)

  def store_keys(self, name: str, x: jax.Array) -> None:
    """Adds to an array by key; stores it after the last head that shares it."""
    plan, ref = self.plan, self.refs[name]
    place = plan.key_place(self._u)
    count, before = self._kept.get((name, self._i, place), (0, None))
    x = x if before is None else before + x
    sharing = 1 if plan.shared == 1 else plan.shared // plan.unit
    if count + 1 == min(sharing, plan.step_units):
      ref[self._place(place, plan.key_width)] = x.astype(ref.dtype)
    self._kept[name, self._i, place] = count + 1, x

  def right(self, x: jax.Array) -> jax.Array:
    """Returns an array by value, or by token, as a right operand."""
    return blocks.diagonal(x.astype(self.dtype), self.plan.unit)

  def right_keys(self, x: jax.Array) -> jax.Array:
    """Returns queries or keys as a right operand, one head below the other."""
    if self.plan.shared > 1:
      return jnp.concatenate([x] * self.plan.unit, axis=0)
    return blocks.diagonal(x, self.plan.unit)

  def right_memory(self, memory: jax.Array) -> jax.Array:
    """Returns a memory `[key, unit * value]` as a right operand of keys."""
    memory = memory.astype(self.dtype)
    if self.plan.shared > 1:
      return memory
    return blocks.diagonal(memory, self.plan.unit)

  def turned(self, name: str) -> jax.Array:
    """Returns queries or keys transposed, `[key, unit * tile]`, float32."""

    def make():
      x, unit = self.keys(name), self.plan.unit
      if self.plan.shared > 1:
        x = jnp.concatenate([x.T] * unit, axis=1)
      else:
        x = blocks.transpose(x, unit)
      return x.astype(jnp.float32)

    return self.of_group(f"turned {name}", make)

  def scores(self, name: str) -> jax.Array:
    """Multiplies queries, or keys, with keys, `[tile, unit * tile]`."""

    def make():
      return blocks.nt(self.keys(name), self.right_keys(self.keys("key")))

    return self.of_group(f"scores {name}", make)

  def between(self) -> tuple[jax.Array, jax.Array]:
    """Returns e^{a_r - b_i} where row r reads i (else 0), and e^{a_r}.

    The first is by token, the second by value.
    """
    plan = self.plan
    a, b = plan.sums("a"), plan.sums("b")
    spread = [self.spread(name, plan.tile) for name in a]
    # Differences first: those of coarse parts are exact.
    log = _sum(x - self.row(name) for x, name in zip(spread, b, strict=True))
    between = jnp.exp(jnp.where(self.seen, log, _NEVER))
    if plan.tile != plan.value_dim:
      spread = [self.spread(name, plan.value_dim) for name in a]
    return between, jnp.exp(_sum(spread))

  def from_start(self) -> jax.Array:
    """Returns e^{a_r}, `[1, lanes]`."""
    return jnp.exp(_sum(map(self.row, self.plan.sums("a"))))

  def begin(self) -> tuple[jax.Array, jax.Array]:
    """Returns the memory before the tile, and the memory that it reads."""
    plan, refs, u = self.plan, self.refs, self._u
    start = memory = self.carried()
    if self.flags is not None:
      resets = self.has(layout_lib.RESETS)
      start = memory = jnp.where(resets, refs["reset"][0, u], memory)
      if not plan.inner:
        continues = self.has(layout_lib.CONTINUES)
        start = jnp.where(continues, refs["chunk_start"][0, u], memory)
        last = self.has(layout_lib.LAST)
        refs["last"][0, u] = jnp.where(last, start, refs["last"][0, u])
    if "saved" in refs:
      refs["saved"][self._i, 0, u] = memory.astype(self.dtype)
    return memory, start

  def end(self, memory: jax.Array, written: jax.Array) -> None:
    """Computes the memory after the tile and passes it on."""
    self.hand_on(self.row("total") * memory + written)

  def hand_on(self, memory: jax.Array) -> None:
    """Passes on the memory after the tile, or the adjoint of that before it."""
    self.refs["carried"][self._u] = memory

  def carried(self) -> jax.Array:
    """Returns the memory, or the adjoint, that the previous tile passed on."""
    return self.refs["carried"][self._u]

  def has(self, flag: int) -> jax.Array:
    """Returns whether the tile has a flag; requires flags."""
    assert self.flags is not None
    return self.flags & flag != 0

  def note_lowest(self, log: jax.Array) -> None:
    """Keeps the minimum over tiles of `[1, key lanes]`."""
    ref, place = self.refs["lowest"], (0, 0, pl.ds(self._u, 1))
    ref[place] = jnp.minimum(ref[place], log)

  def saved(self) -> tuple[jax.Array, jax.Array]:
    """Returns what `begin` returned, in the backward kernel."""
    plan, refs, u = self.plan, self.refs, self._u
    memory = refs["saved"][self._i, 0, u]
    if self.flags is None or plan.inner:
      return memory, memory
    continues = self.has(layout_lib.CONTINUES)
    came = refs["chunk_start"][0, u].astype(self.dtype)
    return memory, jnp.where(continues, came, memory)

  def d_after(self, memory: jax.Array) -> jax.Array:
    """Returns the adjoint of the memory after the tile.

    It also stores the adjoint of `total`. `memory` is the memory before the
    tile.
    """
    d_after = self.carried()
    d_total = jnp.sum(memory.astype(jnp.float32) * d_after, 0, keepdims=True)
    self.store_row("total", d_total)
    return d_after

  def d_before(self, d_after: jax.Array, d_start: jax.Array) -> None:
    """Passes on the adjoint of the memory before the tile.

    `d_start` is the adjoint of the memory that the tile reads.
    """
    self.hand_back(self.row("total") * d_after, d_start)

  def hand_back(self, d_memory: jax.Array, d_start: jax.Array) -> None:
    """Passes on the adjoint of the memory before the tile.

    Args:
      d_memory: Adjoint through the memory that the tile decays and updates.
      d_start: Adjoint of the memory that the tile reads.
    """
    refs, u = self.refs, self._u
    if self.flags is None:
      self.hand_on(d_memory + d_start)
      return
    if not self.plan.inner:
      last = self.has(layout_lib.LAST)
      d_start = d_start + jnp.where(last, refs["d_last"][0, u], 0.0)
      came = jnp.where(self.has(layout_lib.CONTINUES), d_start, 0.0)
      refs["d_chunk_start"][0, u] = refs["d_chunk_start"][0, u] + came
      d_start = d_start - came
    d_memory = d_memory + d_start
    started = jnp.where(self.has(layout_lib.RESETS), d_memory, 0.0)
    refs["d_reset"][0, u] = refs["d_reset"][0, u] + started
    self.hand_on(d_memory - started)
