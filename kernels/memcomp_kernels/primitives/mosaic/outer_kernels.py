"""Memories that sum decayed outer products, as Pallas TPU kernels.

Tokens are read and written as they lie in memory, `[batch, time, heads *
dim]`; all of a tile is done on chip, where memories stay from tile to tile.
Rows are tokens, A is the memory before the tile, and w, a, b, g are gates by
token:

  Y = diag(e^a) Q A + P V + diag(skip) V,  P_{ri} = e^{a_r - b_i} g_i (q_r . k_i)
  A <- total A + K^T diag(w) V

where row r sees i <= r, or i < r ("before"), or, by `Plan.read` "start",
nothing of its tile: Y = Q A, with A as it was at the chunk's start.

A unit is a few heads side by side on lanes (`blocks`). Each has its own queries
and keys, or all share one. Units are interleaved by hand (`schedule`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.primitives.mosaic import blocks, modes, schedule, vmem

# Flags of a tile: it starts a segment, goes on with a chunk that came in, holds
# its row's last chunk.
RESETS, CONTINUES, LAST = 1, 2, 4

# exp of it is zero.
_NEVER = -1e30

_D_KEYS = "d_query", "d_key"

# A float32 is the sum of as many bfloat16.
_TERMS = 3


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
    skip: whether outputs have a share of the value added.
    unit: heads side by side; divides `shared` unless that is 1.
    step_units: of a grid step, whose heads are whole groups or part of one.
    step_tiles: of a grid step.
    group: units emitted in lock step.
    skew: stages between two groups.
  """

  heads: int
  shared: int
  key_dim: int
  value_dim: int
  tile: int
  read: str
  skip: bool
  unit: int
  step_units: int
  step_tiles: int
  group: int
  skew: int

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
    inner = ("a", "b", "rate") if self.inner else ()
    return ("write", "total", *inner, *(("skip",) if self.skip else ()))

  @property
  def columns(self) -> tuple[str, ...]:
    """Names of the gates that kernels also need with tokens on sublanes."""
    return ("write", "a") if self.inner else ("write",)

  @property
  def column_rows(self) -> int:
    """Of `split` of a tile."""
    rows = _TERMS * len(self.columns) * self.step_units * self.unit
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
    for _ in range(_TERMS):
      term = x.astype(jnp.bfloat16)
      terms.append(term)
      x = x - term.astype(x.dtype)
  x = jnp.concatenate(terms, axis=-2)
  free = plan.column_rows - x.shape[-2]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, free), (0, 0)])


class _Refs:
  """References of a grid step, and its gates."""

  def __init__(self, refs: dict[str, Any], plan: Plan):
    self.refs, self.plan = refs, plan
    self.kept: dict[Any, Any] = {}

  def row(self, name: str, i: int, u: int) -> jax.Array:
    """A gate of a unit's tile, `[1, lanes]`."""
    j = i * self.plan.step_units + u
    return self.refs[name][0, 0, 0, j : j + 1]

  def store_row(self, name: str, i: int, u: int, row: jax.Array) -> None:
    """Writes a gate's adjoint."""
    j = i * self.plan.step_units + u
    self.refs[f"d_{name}"][0, 0, 0, j : j + 1] = row

  def once(self, key: Any, make: Callable[[], Any]) -> Any:
    """What is made at its first use."""
    if key not in self.kept:
      self.kept[key] = make()
    return self.kept[key]

  def of_group(self, name: str, i: int, u: int, make: Callable[[], Any]) -> Any:
    """What units that share keys have in common; else their own."""
    return self.once((name, i, self.plan.key_place(u)), make)

  def spread(self, name: str, i: int, u: int, size: int) -> jax.Array:
    """A gate by token, `[tile, unit * size]`, by the matrix unit.

    Moving a number over all lanes is the dearest of the vector unit's moves.
    """
    plan = self.plan
    columns = self.once(
      ("columns", i), lambda: self.refs["columns"][0, 0, 0, i].T
    )

    def chooser():
      shape = plan.column_rows, plan.unit * size
      row = lax.broadcasted_iota(jnp.int32, shape, 0)
      heads = plan.step_units * plan.unit
      first = plan.columns.index(name) * _TERMS * heads + u * plan.unit
      head = first + blocks.head_blocks(shape[1], plan.unit)
      own = [row == head + n * heads for n in range(_TERMS)]
      return functools.reduce(jnp.logical_or, own).astype(jnp.bfloat16)

    chooser = self.once(("chooser", name, u, size), chooser)
    return blocks.nn(columns, chooser)

  def row_sums(self, x: jax.Array) -> jax.Array:
    """Sums over each head's lanes of `[tile, unit * size]`, `[1, lanes]`."""
    unit = self.plan.unit
    shape = max(8, unit), x.shape[1]

    def ones():
      row = lax.broadcasted_iota(jnp.int32, shape, 0)
      own = row == blocks.head_blocks(shape[1], unit)
      return own.astype(jnp.bfloat16)

    ones = self.once(("ones", shape), ones)
    sums = 0
    # Twice the digits of products; all of them where products have them.
    for _ in range(2 if self.refs["query"].dtype == jnp.bfloat16 else _TERMS):
      term = x.astype(jnp.bfloat16)
      sums = sums + blocks.nt(ones, term)
      x = x - term.astype(x.dtype)
    return jnp.concatenate([sums[h : h + 1] for h in range(unit)], axis=1)

  def keys(self, name: str, i: int, u: int) -> jax.Array:
    """Queries or keys of a unit."""
    return self.refs[name][self._place(i, self.plan.key_place(u), True)]

  def values(self, name: str, i: int, u: int) -> jax.Array:
    """Values, outputs or their adjoints of a unit."""
    return self.refs[name][self._place(i, u * self.plan.value_width, False)]

  def _place(self, i: int, lane: int, key: bool):
    plan = self.plan
    width = plan.key_width if key else plan.value_width
    return 0, pl.ds(i * plan.tile, plan.tile), pl.ds(lane, width)

  def store_values(self, name: str, i: int, u: int, x: jax.Array) -> None:
    """Writes what is by value."""
    ref = self.refs[name]
    place = self._place(i, u * self.plan.value_width, False)
    ref[place] = x.astype(ref.dtype)

  def store_keys(self, name: str, i: int, u: int, x: jax.Array) -> None:
    """Writes what is by key, once all heads that share it have added theirs."""
    plan, ref = self.plan, self.refs[name]
    place = plan.key_place(u)
    count, before = self.kept.get((name, i, place), (0, None))
    x = x if before is None else before + x
    sharing = 1 if plan.shared == 1 else plan.shared // plan.unit
    if count + 1 == min(sharing, plan.step_units):
      ref[self._place(i, place, True)] = x.astype(ref.dtype)
    self.kept[name, i, place] = count + 1, x


def _right(x: jax.Array, plan: Plan, *, key: bool) -> jax.Array:
  """`[tile, width]` as a right operand: a unit's heads below each other."""
  if key and plan.shared > 1:
    return jnp.concatenate([x] * plan.unit, axis=0)
  return blocks.diagonal(x, plan.unit)


def _of_keys(memory: jax.Array, plan: Plan) -> jax.Array:
  """A memory `[key, unit * value]` as a right operand of what is by key."""
  return memory if plan.shared > 1 else blocks.diagonal(memory, plan.unit)


def _transposed(x: jax.Array, plan: Plan) -> jax.Array:
  """Queries or keys as `[key, unit * tile]`."""
  if plan.shared > 1:
    return jnp.concatenate([x.T] * plan.unit, axis=1)
  return blocks.transpose(x, plan.unit)


def _seen(plan: Plan) -> tuple[jax.Array, jax.Array]:
  """Bool `[tile, unit * tile]`: which writes a row sees, and its own."""
  shape = plan.tile, plan.lanes
  row = lax.broadcasted_iota(jnp.int32, shape, 0)
  lane = blocks.lane_in_head(plan.lanes, plan.unit)
  return (row > lane if plan.read == "before" else row >= lane), row == lane


def _between(refs: _Refs, i: int, u: int, seen) -> tuple[jax.Array, jax.Array]:
  """e^{a_r - b_i} of what is seen, and e^{a_r} by value."""
  plan = refs.plan
  a = refs.spread("a", i, u, plan.tile)
  difference = a - refs.row("b", i, u)
  between = jnp.exp(jnp.where(seen[0], difference, _NEVER))
  if plan.tile != plan.value_dim:
    a = refs.spread("a", i, u, plan.value_dim)
  return between, jnp.exp(a)


def _with_skip(refs: _Refs, i: int, u: int, seen, shares) -> jax.Array:
  if not refs.plan.skip:
    return shares
  return jnp.where(seen[1], shares + refs.row("skip", i, u), shares)


def _forward_piece(refs: _Refs, seen, flags, i: int, u: int) -> schedule.Piece:
  """A unit's tile of the forward kernel."""
  plan = refs.plan
  dtype = refs.refs["query"].dtype
  query, key = refs.keys("query", i, u), refs.keys("key", i, u)
  value = refs.values("value", i, u)
  turned = refs.of_group(
    "turned", i, u, lambda: _transposed(key, plan).astype(jnp.float32)
  )
  diagonal = blocks.diagonal(value, plan.unit)
  if plan.inner:
    scores = refs.of_group(
      "scores", i, u, lambda: blocks.nt(query, _right(key, plan, key=True))
    )
    between, from_start = _between(refs, i, u, seen)
  yield None
  written = (turned * refs.row("write", i, u)).astype(dtype)
  if plan.inner:
    shares = between * refs.row("rate", i, u) * scores
    shares = _with_skip(refs, i, u, seen, shares).astype(dtype)
  yield None
  written = blocks.nn(written, diagonal)
  if plan.inner:
    output = blocks.nn(shares, diagonal)
  yield schedule.READS
  memory = refs.refs["carried"][u]
  memory, start = _begin(refs.refs, plan, flags, memory, u)
  if "saved" in refs.refs:
    refs.refs["saved"][i, 0, u] = memory.astype(dtype)
  if "last" in refs.refs:
    before = refs.refs["last"][0, u]
    refs.refs["last"][0, u] = jnp.where(flags & LAST != 0, start, before)
  read = blocks.nn(query, _of_keys(start.astype(dtype), plan))
  refs.refs["carried"][u] = refs.row("total", i, u) * memory + written
  yield schedule.WROTE
  output = from_start * read + output if plan.inner else read
  refs.store_values("output", i, u, output)


def _begin(refs, plan: Plan, flags, memory, u: int):
  """The memory before a tile, and what the tile reads."""
  if flags is None:
    return memory, memory
  memory = jnp.where(flags & RESETS != 0, refs["reset"][0, u], memory)
  if plan.inner:
    return memory, memory
  continues = flags & CONTINUES != 0
  return memory, jnp.where(continues, refs["chunk_start"][0, u], memory)


def _run(refs: _Refs, piece, tiles: range, first: Any) -> None:
  """Emits all of a grid step; `first` is its first tile, for flags."""
  plan = refs.plan
  seen = _seen(plan) if plan.inner else None

  def at(i, u):
    flags = None
    if "flags" in refs.refs:
      flags = refs.refs["flags"][pl.program_id(0), first + i]
    return piece(refs, seen, flags, i, u)

  schedule.run(
    at, chunks=tiles, units=plan.step_units, group=plan.group, skew=plan.skew
  )


def _forward_body(refs: dict[str, Any], plan: Plan) -> None:
  """One grid step of the forward kernel; see `forward`."""
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    refs["carried"][...] = refs["memory"][0]
    if "last" in refs:
      refs["last"][...] = jnp.zeros_like(refs["last"])

  first = step * plan.step_tiles
  _run(_Refs(refs, plan), _forward_piece, range(plan.step_tiles), first)

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    refs["final"][0] = refs["carried"][...]


def _backward_piece(refs: _Refs, seen, flags, i: int, u: int) -> schedule.Piece:
  """A unit's tile of the backward kernel."""
  plan = refs.plan
  wide = jnp.float32
  query, key = refs.keys("query", i, u), refs.keys("key", i, u)
  value, given = refs.values("value", i, u), refs.values("d_output", i, u)
  dtype = query.dtype
  memory = refs.refs["saved"][i, 0, u]
  start = memory
  if flags is not None and not plan.inner:
    came = refs.refs["chunk_start"][0, u].astype(dtype)
    start = jnp.where(flags & CONTINUES != 0, came, memory)
  start = _of_keys(start, plan)
  d_diagonal = blocks.diagonal(given, plan.unit)
  turned = refs.of_group("turned", i, u, lambda: _transposed(query, plan))
  write = refs.spread("write", i, u, plan.value_dim)
  if plan.inner:
    keys = _right(key, plan, key=True)
    scores = refs.of_group("scores", i, u, lambda: blocks.nt(query, keys))
    d_shares = blocks.nt(given, blocks.diagonal(value, plan.unit))
    read = blocks.nn(query, start)
    between, from_start = _between(refs, i, u, seen)
  yield None
  d_read = given
  if plan.inner:
    rate = refs.row("rate", i, u)
    d_read = from_start * given.astype(wide)
    per_rate = between * scores * d_shares
    d_rate = jnp.sum(per_rate, axis=0, keepdims=True)
    refs.store_row("rate", i, u, d_rate)
    refs.store_row("b", i, u, -rate * d_rate)
    along, read = rate * per_rate, d_read * read
    d_read = d_read.astype(dtype)
    between = between * rate
    shares = between * scores
    if plan.skip:
      own = jnp.where(seen[1], d_shares, 0.0)
      refs.store_row("skip", i, u, jnp.sum(own, axis=0, keepdims=True))
    shares = _with_skip(refs, i, u, seen, shares).astype(dtype)
    d_scores = (between * d_shares).astype(dtype)
    turned = turned.astype(wide) * jnp.exp(refs.row("a", i, u))
    turned = turned.astype(dtype)
  written = (write * value.astype(wide)).astype(dtype)
  yield None
  d_start = blocks.nn(turned, d_diagonal)
  d_query = blocks.nt(d_read, start)
  if plan.inner:
    if plan.tile == plan.value_dim:
      d_a = refs.row_sums(along + read)
    else:
      d_a = refs.row_sums(along) + refs.row_sums(read)
    refs.store_row("a", i, u, d_a)
    d_query = d_query + blocks.nn(d_scores, keys)
    shares = blocks.transpose(shares, plan.unit)
    d_scores = blocks.transpose(d_scores, plan.unit)
  refs.store_keys("d_query", i, u, d_query)
  yield None
  if plan.inner:
    d_value = blocks.nn(shares, d_diagonal)
    d_key = blocks.nn(d_scores, _right(query, plan, key=True))
  yield schedule.READS
  d_after = refs.refs["carried"][u]
  low = _of_keys(d_after.astype(dtype), plan)
  met = blocks.nn(key, low)
  d_left = blocks.nt(written, low)
  kept = refs.row("total", i, u) * d_after
  d_total = jnp.sum(memory.astype(wide) * d_after, axis=0, keepdims=True)
  refs.store_row("total", i, u, d_total)
  refs.refs["carried"][u] = _before(refs.refs, plan, flags, u, kept, d_start)
  yield schedule.WROTE
  refs.store_row("write", i, u, refs.row_sums(met * value.astype(wide)))
  met = write * met
  if plan.inner:
    met, d_left = met + d_value, d_left + d_key
  refs.store_values("d_value", i, u, met)
  refs.store_keys("d_key", i, u, d_left)


def _before(refs, plan: Plan, flags, u: int, kept, d_start) -> jax.Array:
  """The adjoint of the memory before a tile."""
  if flags is None:
    return kept + d_start
  if not plan.inner:
    last = jnp.where(flags & LAST != 0, refs["d_last"][0, u], 0.0)
    d_start = d_start + last
    came = jnp.where(flags & CONTINUES != 0, d_start, 0.0)
    refs["d_chunk_start"][0, u] = refs["d_chunk_start"][0, u] + came
    d_start = d_start - came
  d_memory = kept + d_start
  started = jnp.where(flags & RESETS != 0, d_memory, 0.0)
  refs["d_reset"][0, u] = refs["d_reset"][0, u] + started
  return d_memory - started


def _backward_body(refs: dict[str, Any], plan: Plan) -> None:
  """One grid step of the backward kernel, from the last tile on."""
  step, steps = pl.program_id(2), pl.num_programs(2)

  @pl.when(step == 0)
  def _():
    refs["carried"][...] = refs["d_final"][0]
    for name in ("d_reset", "d_chunk_start"):
      if name in refs:
        refs[name][...] = jnp.zeros_like(refs[name])

  first = (steps - 1 - step) * plan.step_tiles
  tiles = range(plan.step_tiles)[::-1]
  _run(_Refs(refs, plan), _backward_piece, tiles, first)

  @pl.when(step == steps - 1)
  def _():
    refs["d_memory"][0] = refs["carried"][...]


def _call(
  body: Callable[..., None],
  name: str,
  plan: Plan,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  flags: jax.Array | None,
  *,
  reverse: bool,
) -> dict[str, jax.Array]:
  """Runs a body over the grid (batch, units, tiles).

  Args:
    body: of references by name, and the plan.
    name: of the kernel.
    plan: the plan.
    operands: by token `[batch, time, width]`, gates `[batch, Plan.steps, steps
      of time, Plan.rows, lanes]`, memories `[batch, units, key, unit * value]`,
      `saved`.
    results: likewise.
    flags: int32 `[batch, tiles]`, or None.
    reverse: whether tiles are taken from the last one on.
  """
  batch, time = operands["query"].shape[:2]
  steps = time // plan.tokens
  memory = plan.step_units, plan.key_dim, plan.value_width
  carried = pltpu.VMEM(memory, jnp.float32)

  def at(i):
    return steps - 1 - i if reverse else i

  def spec(name, x):
    if name == "saved":
      block = plan.step_tiles, 1, *memory
      return pl.BlockSpec(block, lambda b, u, i, *_: (at(i), b, u, 0, 0))
    if name == "columns" or name.removeprefix("d_") in plan.gates:
      block = 1, 1, 1, *x.shape[3:]
      rest = (0,) * (x.ndim - 3)
      return pl.BlockSpec(block, lambda b, u, i, *_: (b, u, at(i), *rest))
    if x.ndim == 4:
      return pl.BlockSpec((1, *memory), lambda b, u, i, *_: (b, u, 0, 0))
    is_key = name.endswith(("query", "key"))
    width = plan.step_keys if is_key else plan.step_units * plan.value_width
    block = 1, plan.tokens, width
    if is_key and not name.startswith("d_") and plan.key_parts > 1:
      # Not `//`, whose rounding down asks for the TPU's kind.
      return pl.BlockSpec(
        block, lambda b, u, i, *_: (b, at(i), lax.div(u, plan.key_parts))
      )
    return pl.BlockSpec(block, lambda b, u, i, *_: (b, at(i), u))

  arrays = operands | results
  specs = {key: spec(key, x) for key, x in arrays.items()}
  needed = vmem.num_bytes(
    [(arrays[key], specs[key]) for key in arrays], [carried]
  )
  vmem.check(needed, name, "take a shorter tile (Tiling.tile_time)")

  def kernel(*refs):
    names = [*operands, *results, "carried"]
    if flags is not None:
      names = ["flags", *names]
    body(dict(zip(names, refs, strict=True)), plan)

  outputs = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=0 if flags is None else 1,
      grid=(batch, plan.steps, steps),
      in_specs=[specs[key] for key in operands],
      out_specs=[specs[key] for key in results],
      scratch_shapes=[carried],
    ),
    out_shape=list(results.values()),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=vmem.LIMIT,
    ),
    name=name,
    interpret=modes.interpret(),
  )(*(() if flags is None else (flags,)), *operands.values())
  return dict(zip(results, outputs, strict=True))


_struct = jax.ShapeDtypeStruct


def forward(
  plan: Plan,
  tokens: dict[str, jax.Array],
  memory: jax.Array,
  *,
  dtype: Any,
  flags: jax.Array | None = None,
  reset: jax.Array | None = None,
  chunk_start: jax.Array | None = None,
  save: bool = False,
) -> dict[str, jax.Array]:
  """Runs the forward kernel.

  Args:
    plan: the plan.
    tokens: `query` and `key` `[batch, time, groups * key]`, `value` `[batch,
      time, heads * value]`, whole grid steps of them, and `Plan.gates` `[batch,
      Plan.steps, steps of time, Plan.rows, Plan.lanes]`, float32 (`total` by
      value, not by token); a place that is empty writes nothing.
    memory: A before the first tile, `[batch, units, key, unit * value]`,
      float32.
    dtype: of outputs.
    flags: int32 `[batch, tiles]`, or None where no tile is special.
    reset: as `memory`, with flags: what a segment starts from.
    chunk_start: likewise: what a chunk that came in started from.
    save: whether to return `saved`.

  Returns:
    `output`, Y as `value`; `final`, A after the last tile; `saved`, A before
    each tile, `[tiles, batch, units, key, unit * value]` in the dtype of
    products; `last`, with flags and `read="start"`, the start of each row's
    last chunk.
  """
  given = tokens | {"memory": memory}
  if plan.inner:
    given["columns"] = split(plan, tokens)
  results = {
    "output": _struct(tokens["value"].shape, dtype),
    "final": _struct(memory.shape, memory.dtype),
  }
  if save:
    shape = tokens["query"].shape[1] // plan.tile, *memory.shape
    results["saved"] = _struct(shape, tokens["query"].dtype)
  if flags is not None:
    given["reset"] = reset
    if not plan.inner:
      given["chunk_start"] = chunk_start
      results["last"] = _struct(memory.shape, memory.dtype)
  return _call(
    _forward_body, "outer_forward", plan, given, results, flags, reverse=False
  )


def backward(
  plan: Plan,
  tokens: dict[str, jax.Array],
  saved: jax.Array,
  d_output: jax.Array,
  d_final: jax.Array,
  *,
  flags: jax.Array | None = None,
  chunk_start: jax.Array | None = None,
  d_last: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """Runs the backward kernel.

  Args:
    plan: the plan.
    tokens: as forward.
    saved: of the forward kernel.
    d_output: the adjoint of its `output`, in the dtype of products.
    d_final: of its `final`.
    flags: as forward.
    chunk_start: as forward.
    d_last: of its `last`.

  Returns:
    Adjoints, each `d_` and a name: of all tokens, of `memory` and, with flags,
    of `reset` and `chunk_start` (where there is one).
  """
  given = tokens | {"saved": saved, "d_output": d_output, "d_final": d_final}
  given["columns"] = split(plan, tokens)
  memory = _struct(d_final.shape, d_final.dtype)
  results = {
    f"d_{name}": _struct(x.shape, x.dtype) for name, x in tokens.items()
  }
  if plan.key_parts > 1:  # sums of each grid step
    shape = *tokens["key"].shape[:2], plan.steps * plan.key_dim
    results |= {name: _struct(shape, jnp.float32) for name in _D_KEYS}
  results["d_memory"] = memory
  if flags is not None:
    results["d_reset"] = memory
    if not plan.inner:
      given |= {"chunk_start": chunk_start, "d_last": d_last}
      results["d_chunk_start"] = memory
  found = _call(
    _backward_body, "outer_backward", plan, given, results, flags, reverse=True
  )
  if plan.key_parts > 1:
    for name in _D_KEYS:
      like = tokens["key"]
      x = found[name].reshape(*like.shape[:2], -1, plan.key_parts, plan.key_dim)
      found[name] = jnp.sum(x, axis=3).astype(like.dtype).reshape(like.shape)
  return found
