"""Packed rows in chunk form: as many pages of tiles as the rows need.

A row of many short segments needs more tiles than a row of full chunks, at most
one tile per token. Tiles therefore run in pages of a fixed size, in a loop
whose length is known only at run time. Nearly always one page holds all tiles.
Work grows with the number of tiles, but memory does not. Only the last page
keeps what the gradient needs; for the other pages it is recomputed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, derivative
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.math import solver


class Pages(NamedTuple):
  """How tiles are cut into pages.

  Attributes:
    count: int32 scalar, number of pages that the call needs.
    layout: page number -> layout of that page.
  """

  count: jax.Array
  layout: Callable[[jax.Array], layout_lib.Layout]


def cut(where: layout_lib.Places, chunk: int) -> Pages:
  """Cuts the tiles of packed rows into pages.

  Args:
    where: each token's tile.
    chunk: tokens per tile.
  """
  size = layout_lib.page_tiles(where.tile.shape[1], chunk)

  def layout(page):
    return layout_lib.indexed(
      where, chunk=chunk, num_tiles=size, first=page * size
    )

  return Pages(-(-where.needed // size), layout)


def _run(form, engine, operands, pages, page, carry, save):
  """Runs one page from `carry`, (memories, start of the current chunk)."""
  memories, start = carry
  operands = operands._replace(memories=memories, chunk_start=start)
  return engine.forward(form, pages.layout(page), operands, save)


def _zeros(tree: Any, operands: Any) -> Any:
  """Returns zeros shaped like `tree`, as the carry of a loop over pages."""
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
  return contract.vary_like(zeros, operands)


def forward(
  form: form_lib.Form,
  engine: form_lib.Engine,
  pages: Pages,
  operands: form_lib.Operands,
  save: bool,
) -> tuple[form_lib.Result, Any]:
  """Returns the result of all pages, and with `save` the last page's saved."""
  operands = derivative.only_first(operands)
  carry = operands.memories, operands.chunk_start
  run = functools.partial(_run, form, engine, operands, pages)
  result, saved = _zeros(
    jax.eval_shape(lambda carry: run(jnp.int32(0), carry, save), carry),
    operands,
  )
  result = result._replace(memories=carry[0], chunk_start=carry[1])

  def body(state):
    page, before, _ = state
    after, saved = run(page, (before.memories, before.chunk_start), save)
    stats = before.stats
    if stats is not None:
      both = jax.tree.map(lambda *x: jnp.stack(x), stats, after.stats)
      stats = solver.total(both)
    # The outputs of tokens in other pages are zeros.
    outputs = before.outputs + after.outputs
    return page + 1, after._replace(outputs=outputs, stats=stats), saved

  _, result, saved = lax.while_loop(
    lambda state: state[0] < pages.count, body, (jnp.int32(0), result, saved)
  )
  return result, saved if save else None


def backward(
  form: form_lib.Form,
  engine: form_lib.Engine,
  pages: Pages,
  operands: form_lib.Operands,
  saved: Any,
  cotangents: form_lib.Result,
) -> form_lib.Operands:
  """Returns the adjoints of `operands`, from the last page to the first."""
  operands, cotangents = derivative.only_first((operands, cotangents))

  def again(page):
    # A segment has no more tiles than a page. So the page before this one
    # determines the memories that this page starts from, whatever memories
    # that page itself started from.
    def body(page, state):
      # Only the first page may continue a chunk and read its start.
      carry = state[0], operands.chunk_start
      result, saved = _run(form, engine, operands, pages, page, carry, True)
      return result.memories, saved

    state = operands.memories, _zeros(saved, operands)
    return lax.fori_loop(jnp.maximum(page - 1, 0), page + 1, body, state)[1]

  def body(state):
    page, after = state
    of_page = lax.cond(page == pages.count - 1, lambda _: saved, again, page)
    d = engine.backward(
      form,
      pages.layout(page),
      operands,
      of_page,
      cotangents._replace(
        memories=after.memories, chunk_start=after.chunk_start
      ),
    )
    sums = {
      name: jax.tree.map(jnp.add, getattr(after, name), getattr(d, name))
      for name in ("reset", "reset_start", "inputs")
    }
    return page - 1, d._replace(**sums)

  d = _zeros(operands, operands)._replace(
    memories=cotangents.memories, chunk_start=cotangents.chunk_start
  )
  return lax.while_loop(
    lambda state: state[0] >= 0, body, (pages.count - 1, d)
  )[1]
