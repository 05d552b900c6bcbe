"""What the chunk form needs to know about a memory; the scan over its tiles.

The chunk form cuts a sequence into tiles of tokens and computes each tile with
matrix products. A tile is either a chunk, where the memory's definition has
chunks, or free, which means that its size does not change results.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.math import solver
from memcomp_kernels.options import at_least, option, options

Memories = tuple[Any, ...]


@options
class Tiling:
  """Size of free tiles. It changes the speed, never the results.

  A call without a tiling uses the op's own size, which may differ from this
  default. Where chunks are part of the definition, nothing reads `tile_time`.

  Attributes:
    tile_time: tokens per tile, >= 1. Work within a tile grows with its square,
      work between tiles with the number of tiles.
  """

  tile_time: int = option(64, at_least(1))


DEFAULT = Tiling()


class Engine(NamedTuple):
  """Runs the chunk algebra over all tiles, forward and backward.

  Attributes:
    forward: (form, layout, operands, save) -> (Result, saved). `saved` is a
      pytree of `[tiles, ...]` arrays, the memories before each tile in the
      form that `backward` needs. Without `save` nobody reads it.
    backward: (form, layout, operands, saved, cotangents) -> Operands, with
      `cotangents` a Result without stats.
    as_saved: (form, operands) -> `saved` of the first tile, without the tile
      axis.
  """

  forward: Callable[..., tuple["Result", Any]]
  backward: Callable[..., "Operands"]
  as_saved: Callable[..., Any]


class TileCall(NamedTuple):
  """One tile, and the memories before it: what `Form.run_tile` takes.

  Attributes:
    memories: the memories before the tile.
    starts: the memories at which chunk-start gradients are taken. These are
      `memories`, except for a chunk that began in an earlier call.
    inputs: `[batch, heads, tile_time, ...]`, or what `Form.prepare` made of
      them. Empty places hold zeros and must not change anything.
    valid: bool `[batch, tile_time]`, whether a token is at a place. None where
      `prepared_engine` asks for the dtype of outputs.
    spec: the memory's options.
    tiling: the form's other performance options.
  """

  memories: Memories
  starts: Memories
  inputs: Any
  valid: Any
  spec: Any
  tiling: Any

  @property
  def complete(self) -> jax.Array:
    """Bool `[batch]`, whether the tile's chunk ends; see `layout.complete`."""
    return self.valid[:, -1]


@dataclasses.dataclass(frozen=True)
class Form:
  """A memory as the chunk form runs it; hashable.

  Its State is a NamedTuple with `segment_id` int32 `[batch]`. Where chunks are
  part of the memory's definition, it also has `position` int32 `[batch]`, the
  number of tokens since the current chunk started.

  Attributes:
    spec: the memory's options.
    tile_time: tokens per tile. This is the chunk size where chunks are part of
      the definition; otherwise it is free.
    run_tile: `TileCall` -> (memories after the tile, outputs `[batch, heads,
      tile_time, ...]`, `solver.Stats` `[batch, heads]` or None).
    memories: fields of the State that every token updates, each a pytree of
      arrays `[batch, heads, ...]`.
    starts: for each of `memories` the State's field that keeps its value at the
      start of the current chunk, or None where no tile reads that value. Empty
      if no tile reads anything of a chunk's start.
    tiling: other performance options of the tile; they never change results.
    prepare: (inputs, spec) -> what `run_tile` gets in place of inputs.
      It computes everything of a tile that does not depend on the memory. All
      tiles are prepared at once, which leaves little work for the sequential
      loop over tiles. None passes the inputs unchanged.
    engine: what runs all tiles in order; None for `ENGINE`.
  """

  spec: Any
  tile_time: int
  run_tile: Callable[[TileCall], tuple[Memories, jax.Array, Any]]
  memories: tuple[str, ...]
  starts: tuple[str | None, ...] = ()
  tiling: Any = None
  prepare: Callable[..., Any] | None = None
  engine: Engine | None = None


class Operands(NamedTuple):
  """The arguments with respect to which `chunk` is differentiable.

  Attributes:
    memories: the memories before the first token.
    chunk_start: the memories at the start of the chunk that is unfinished
      there.
    reset: the memories that new segments start from.
    inputs: inputs of the call.
    reset_start: the chunk start that belongs to `reset`; None without segments.
      Only `ENGINE` reads it, see `chunked`. Other engines leave its adjoint
      out, which then is zero.
  """

  memories: Memories
  chunk_start: Memories
  reset: Memories
  inputs: Any
  reset_start: Memories | None = None


class Result(NamedTuple):
  """What `chunk` computes; `chunk_start` belongs to the last token's chunk."""

  memories: Memories
  chunk_start: Memories
  outputs: jax.Array
  stats: solver.Stats | None


def _body(form: Form, resets, carry, laid):
  """Runs one tile, as the body of the scan over tiles.

  Args:
    form: the memory.
    resets: the memories that new segments start from, and the start of their
      chunk.
    carry: the memories, and the start of the current chunk.
    laid: inputs, and facts about the tile.
  """
  reset, reset_start = resets
  memories, current_start = carry
  inputs, valid, flags = laid
  if flags is None:
    starts = memories
  else:
    memories = contract.batched_where(flags.resets, reset, memories)
    starts = contract.batched_where(flags.continues, current_start, memories)
    if reset_start is not None:
      starts = contract.batched_where(flags.resets, reset_start, starts)
    current_start = contract.batched_where(
      flags.occupied, starts, current_start
    )
  memories, outputs, stats = form.run_tile(
    TileCall(memories, starts, inputs, valid, form.spec, form.tiling)
  )
  carry = memories, starts if flags is None else current_start
  return carry, (outputs, stats)


def prepare(form: Form, inputs: Any) -> Any:
  """Returns what tiles get for `inputs` `[tiles, batch, heads, ...]`."""
  if form.prepare is None:
    return inputs
  return jax.vmap(lambda x: form.prepare(x, form.spec))(inputs)


def _forward(
  form: Form,
  layout: layout_lib.Layout,
  operands: Operands,
  save: bool,
) -> tuple[Result, Memories]:
  """Returns the result, and the memories before each tile."""

  def body(carry, laid):
    new_carry, results = _body(form, resets, carry, laid)
    return new_carry, (*results, carry[0])

  carry = operands.memories, operands.chunk_start
  resets = operands.reset, operands.reset_start
  inputs = prepare(form, layout_lib.lay(layout, operands.inputs))
  laid = inputs, layout_lib.valid(layout), layout.flags
  carry, (outputs, stats, before) = lax.scan(body, carry, laid)
  outputs = layout_lib.unlay(layout, outputs)
  if stats is not None:
    stats = solver.total(stats)
  return Result(*carry, outputs, stats), before


def _backward(form: Form, layout, operands: Operands, before, cotangents):
  """Scans tiles in reverse and recomputes each from the memories before it."""
  d_outputs = layout_lib.lay(layout, cotangents.outputs)
  resets = operands.reset, operands.reset_start
  inputs = layout_lib.lay(layout, operands.inputs)
  prepared, unprepare = jax.vjp(lambda x: prepare(form, x), inputs)
  laid = prepared, layout_lib.valid(layout), layout.flags

  def body(carry, x):
    d_carry, d_resets = carry
    memories, (inputs, valid, flags), d_outputs = x

    # Only a tile that continues a chunk reads the start of the current chunk.
    # That start is always the one that was passed into the call.
    def tile(resets, carry, inputs):
      laid = inputs, valid, flags
      carry, (outputs, stats) = _body(form, resets, carry, laid)
      return (carry, outputs), stats

    _, vjp, _ = jax.vjp(
      tile,
      resets,
      (memories, operands.chunk_start),
      inputs,
      has_aux=True,
    )
    d_resets_tile, d_carry, d_inputs = vjp((d_carry, d_outputs))
    if flags is not None:
      d_resets = jax.tree.map(jnp.add, d_resets, d_resets_tile)
    return (d_carry, d_resets), d_inputs

  d_carry = cotangents.memories, cotangents.chunk_start
  d_resets = jax.tree.map(jnp.zeros_like, resets)
  (d_carry, d_resets), d_inputs = lax.scan(
    body,
    (d_carry, d_resets),
    (before, laid, d_outputs),
    reverse=True,
  )
  (d_inputs,) = unprepare(d_inputs)
  d_inputs = layout_lib.unlay(layout, d_inputs)
  d_memories, d_chunk_start = d_carry
  d_reset, d_reset_start = d_resets
  return Operands(d_memories, d_chunk_start, d_reset, d_inputs, d_reset_start)


ENGINE = Engine(_forward, _backward, lambda form, operands: operands.memories)
"""Runs tiles with `lax.scan` and recomputes each one for its gradient."""

LOWEST_SUM = -60.0
"""Lowest sum G of log decays in a tile for which kernels may split decays.

They split exp(G_r - G_i) into two factors. Down to this sum the larger factor
is at most exp(60), about 1e26, which float32 can represent.
"""


def forward_or_again(
  failed: jax.Array,
  form: Form,
  layout: layout_lib.Layout,
  operands: Operands,
  result: Result,
) -> Result:
  """Returns a kernel's `result`, or that of `ENGINE` if `failed`.

  Whether a kernel supports some calls depends on values, such as decays.
  """

  def again():
    found, _ = ENGINE.forward(form, layout, operands, False)
    return found._replace(stats=result.stats)

  return lax.cond(failed, again, lambda: result)


def backward_or_again(
  failed: jax.Array,
  form: Form,
  layout: layout_lib.Layout,
  operands: Operands,
  cotangents: Result,
  by_kernel: Callable[[], Operands],
) -> Operands:
  """Returns `by_kernel()`, or the adjoints of `ENGINE` if `failed`."""

  def again():
    _, saved = ENGINE.forward(form, layout, operands, True)
    return ENGINE.backward(form, layout, operands, saved, cotangents)

  return lax.cond(failed, again, lambda: filled(by_kernel(), operands))


def filled(adjoints: Operands, operands: Operands) -> Operands:
  """Adds a zero adjoint of `reset_start`, which kernels do not read."""
  if adjoints.reset_start is not None:
    return adjoints
  zeros = jax.tree.map(jnp.zeros_like, operands.reset_start)
  return adjoints._replace(reset_start=zeros)
