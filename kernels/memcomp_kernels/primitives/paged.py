"""Packed rows in chunk form: tiles in pages, as many as the rows need.

A row of many short segments needs more tiles than one that is filled by whole
chunks, up to one a token. Tiles are run by pages of a fixed size, in a loop
whose length is found at run time; nearly always one page holds them all. Work
grows with the number of tiles, memory does not.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.primitives import form as form_lib
from memcomp_kernels.primitives import tiles, triangular

_KEPT = 4
"""Memories before pages that are kept for the gradient: it runs the pages
since the nearest of them again."""


class Pages(NamedTuple):
  """How tiles are cut into pages.

  Attributes:
    count: int32 scalar, pages that the call needs.
    layout: of one page, by its number.
  """

  count: jax.Array
  layout: Callable[[jax.Array], tiles.Layout]

  @property
  def stride(self) -> jax.Array:
    """Pages from one whose memories are kept to the next."""
    return jnp.maximum(-(-self.count // _KEPT), 1)


class Saved(NamedTuple):
  """What the gradient needs.

  Attributes:
    last: what the engine saved of the last page.
    kept: memories before every `stride`-th page, `[_KEPT, ...]`.
  """

  last: Any
  kept: form_lib.Memories


def cut(
  where: tiles.Places, position: jax.Array, *, chunk: int, time: int
) -> Pages:
  """Cuts the tiles of packed rows into pages.

  Args:
    where: each token's tile.
    position: as of `tiles.places`.
    chunk: tokens a tile.
    time: tokens a row.
  """
  whole = -(-time // chunk)
  # Enough for documents of four chunks on average: each may leave a tile part
  # empty.
  size = min(whole + max(whole // 4, 2), time + 1)

  def layout(page):
    return tiles.indexed(
      where, position, chunk=chunk, num_tiles=size, first=page * size
    )

  return Pages(-(-where.needed // size), layout)


def _run(form, engine, operands, pages, page, carry, save):
  """One page from `carry`, (memories, start of the current chunk)."""
  memories, start = carry
  operands = operands._replace(memories=memories, chunk_start=start)
  return engine.forward(form, pages.layout(page), operands, save)


def _zeros(tree: Any) -> Any:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def forward(
  form: form_lib.Form,
  engine: form_lib.Engine,
  pages: Pages,
  operands: form_lib.Operands,
  save: bool,
) -> tuple[form_lib.Result, Saved | None]:
  """Returns the result of all pages, and with `save` what `backward` takes."""
  carry = operands.memories, operands.chunk_start
  run = functools.partial(_run, form, engine, operands, pages)
  result, last = jax.eval_shape(
    lambda carry: run(jnp.int32(0), carry, save), carry
  )
  result = _zeros(result)._replace(memories=carry[0], chunk_start=carry[1])
  saved = None
  if save:
    kept = jax.tree.map(
      lambda x: jnp.zeros((_KEPT, *x.shape), x.dtype), operands.memories
    )
    saved = Saved(_zeros(last), kept)

  def body(state):
    page, before, saved = state
    after, last = run(page, (before.memories, before.chunk_start), save)
    if save:
      slot = jnp.where(page % pages.stride, _KEPT, page // pages.stride)
      kept = jax.tree.map(
        lambda x, new: x.at[slot].set(new, mode="drop"),
        saved.kept,
        before.memories,
      )
      saved = Saved(last, kept)
    stats = before.stats
    if stats is not None:
      both = jax.tree.map(lambda *x: jnp.stack(x), stats, after.stats)
      stats = triangular.total(both)
    # Tokens of other pages are zeros.
    outputs = before.outputs + after.outputs
    return page + 1, after._replace(outputs=outputs, stats=stats), saved

  _, result, saved = lax.while_loop(
    lambda state: state[0] < pages.count, body, (jnp.int32(0), result, saved)
  )
  return result, saved


def backward(
  form: form_lib.Form,
  engine: form_lib.Engine,
  pages: Pages,
  operands: form_lib.Operands,
  saved: Saved,
  cotangents: form_lib.Result,
) -> form_lib.Operands:
  """Returns the adjoints of `operands`, from the last page to the first."""

  def again(page):
    base = page // pages.stride
    memories = jax.tree.map(lambda x: x[base], saved.kept)

    def body(page, state):
      # Only the first page may continue a chunk, and reads its start.
      carry = state[0], operands.chunk_start
      result, last = _run(form, engine, operands, pages, page, carry, True)
      return result.memories, last

    state = memories, _zeros(saved.last)
    return lax.fori_loop(base * pages.stride, page + 1, body, state)[1]

  def body(state):
    page, after = state
    of_page = lax.cond(
      page == pages.count - 1, lambda _: saved.last, again, page
    )
    d = engine.backward(
      form,
      pages.layout(page),
      operands,
      of_page,
      cotangents._replace(
        memories=after.memories, chunk_start=after.chunk_start
      ),
    )
    d_reset, d_inputs = jax.tree.map(
      jnp.add, (after.reset, after.inputs), (d.reset, d.inputs)
    )
    return page - 1, d._replace(reset=d_reset, inputs=d_inputs)

  d = _zeros(operands)._replace(
    memories=cotangents.memories, chunk_start=cotangents.chunk_start
  )
  return lax.while_loop(
    lambda state: state[0] >= 0, body, (pages.count - 1, d)
  )[1]
