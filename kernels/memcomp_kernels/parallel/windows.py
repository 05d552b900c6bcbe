"""What tokens leave in a window, as values that combine associatively.

This serves time sharded over chips. Each chip summarises its own tokens, and a
scan over the chips gives each one the window before its first token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import window


class Summary(NamedTuple):
  """What tokens leave in an empty window; `then` combines summaries.

  Attributes:
    rows: `[batch, heads, size, ...]` leaves.
    position: int32 `[batch]`, position of the segment at the end, counted from
      the first of these tokens or from the start of their last segment.
    restarted: bool `[batch]`, whether a segment started among these tokens.
  """

  rows: Any
  position: jax.Array
  restarted: jax.Array


def then(first: Summary, second: Summary, *, sink_tokens: int = 0) -> Summary:
  """Returns the summary of `first`'s tokens, then `second`'s; associative.

  `first` may be a state: its rows and position, with `restarted` false.
  """
  size = jax.tree.leaves(first.rows)[0].shape[2]
  before = jnp.where(second.restarted, 0, first.position)
  position = before + second.position
  token = window.held(position, size=size, sink_tokens=sink_tokens)
  # A token of `first` keeps its row, because its position is the same.
  token -= before[:, None]
  new = second.restarted[:, None] | (token >= 0)
  row = jnp.where(token >= 0, window.row_of(token, size, sink_tokens), size)

  def one(x, y):
    y = jnp.moveaxis(window.rows_at(y, row), 1, 2)
    return jnp.where(window.expand(new[:, None], y), y, x)

  return Summary(
    jax.tree.map(one, first.rows, second.rows),
    position,
    first.restarted | second.restarted,
  )


def summarize(
  rows: Any,
  tokens: Any,
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  reset: tuple[Any, jax.Array],
  *,
  sink_tokens: int = 0,
) -> Summary:
  """Returns what the tokens of a call leave in an empty window.

  Args:
    rows: `[batch, heads, size, ...]` leaves, for their shapes.
    tokens: `[batch, time, heads, ...]` leaves.
    segment_ids: see `window.plan`.
    segment_id: `[batch]`, segment of the token before the call.
    reset: rows and position that new segments start from.
    sink_tokens: number of rows that keep the first tokens.
  """
  reset_rows, reset_position = reset
  empty = jax.tree.map(jnp.zeros_like, rows)
  places = window.plan(
    segment_ids,
    segment_id,
    jnp.zeros_like(segment_id),
    reset_position,
    time=jax.tree.leaves(tokens)[0].shape[1],
    size=jax.tree.leaves(rows)[0].shape[2],
    sink_tokens=sink_tokens,
    max_position=0,
  )
  return Summary(
    window.advance(
      places, empty, reset_rows, window.join(places, empty, tokens)
    ),
    places.next_position,
    places.restarted,
  )
