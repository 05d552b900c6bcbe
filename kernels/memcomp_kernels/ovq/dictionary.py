"""The dictionary: which row each token of a chunk joins, and the new means.

Let m rows be in use before the chunk and m' after it. The n = m' - m tokens
whose largest product with a row is smallest begin rows of their own, in that
order. Each of the others joins the row with which it has the largest product.
In an empty dictionary, the chunk's first token begins the first row, and
products are with that token.

Each row is the mean of all its tokens: with c tokens so far, and s new ones
from the chunk, it becomes (c d + sum) / (c + s). The choice of rows has no
derivative.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.contract import einsum

if TYPE_CHECKING:
  from memcomp_kernels.ovq import reference


class Dictionary(NamedTuple):
  """The dictionary of a `reference.State`."""

  keys: jax.Array
  values: jax.Array
  counts: jax.Array


def rows_in_use(counts: jax.Array, spec: "reference.Spec") -> jax.Array:
  """Returns the number of rows in use, int32 `[batch, heads]`."""
  tokens = jnp.sum(lax.stop_gradient(counts), axis=-1)
  return spec.rows(jnp.round(tokens).astype(jnp.int32))


def log_counts(counts: jax.Array, spec: "reference.Spec") -> jax.Array:
  """Returns what is added to the scores of rows; -inf for unused rows."""
  place = jnp.arange(counts.shape[-1])
  used = (place < rows_in_use(counts, spec)[..., None]) & (counts > 0)
  bias = jnp.log(jnp.where(used, counts, 1)) if spec.count_bias else 0.0
  return jnp.where(used, bias, -jnp.inf)


def assign(
  dictionary: Dictionary, keys: jax.Array, spec: "reference.Spec"
) -> jax.Array:
  """Returns the row that each token joins, int32 `[batch, heads, chunk]`.

  Args:
    dictionary: the dictionary before the chunk.
    keys: keys of the chunk's tokens, `[batch, heads, chunk, key]`.
    spec: the memory's options.
  """
  rows, keys = lax.stop_gradient((dictionary.keys, keys))
  chunk = keys.shape[-2]
  used = rows_in_use(dictionary.counts, spec)
  tokens = jnp.sum(lax.stop_gradient(dictionary.counts), axis=-1)
  after = spec.rows(jnp.round(tokens).astype(jnp.int32) + chunk)

  products = einsum("bhtk,bhnk->bhtn", keys, rows)
  in_use = jnp.arange(rows.shape[-2]) < used[..., None, None]
  products = jnp.where(in_use, products, -jnp.inf)
  best, joined = jnp.max(products, -1), jnp.argmax(products, -1)
  with_first = einsum("bhtk,bhk->bht", keys, keys[..., 0, :])
  with_first = with_first.at[..., 0].set(jnp.inf)
  empty = used == 0
  best = jnp.where(empty[..., None], with_first, best)
  # The row of the first token already exists.
  first_new = jnp.where(empty, 1, used)
  rank = jnp.argsort(jnp.argsort(best, axis=-1), axis=-1)
  founds = rank < (after - first_new)[..., None]
  return jnp.where(founds, first_new[..., None] + rank, joined)


def update(
  dictionary: Dictionary,
  keys: jax.Array,
  values: jax.Array,
  spec: "reference.Spec",
) -> Dictionary:
  """Returns the dictionary after a complete chunk of tokens.

  Args:
    dictionary: the dictionary before the chunk.
    keys: `[batch, heads, chunk, key]`.
    values: `[batch, heads, chunk, value]`.
    spec: the memory's options.
  """
  rows = dictionary.keys.shape[-2]
  joins = jax.nn.one_hot(
    assign(dictionary, keys, spec), rows, dtype=dictionary.counts.dtype
  )
  joined = jnp.sum(joins, axis=-2)
  counts = dictionary.counts + joined
  # Empty rows do not change. A maximum would have its kink at counts of 1.
  share = (1 / jnp.where(counts > 0.5, counts, 1))[..., None]

  def mean(old, new):
    sums = einsum("bhtn,bhtd->bhnd", joins, new)
    found = old + share * (sums - joined[..., None] * old)
    if not spec.normalize_rows:
      return found
    square = jnp.sum(found * found, axis=-1, keepdims=True)
    return found / jnp.sqrt(jnp.where(square > 0, square, 1))

  return Dictionary(
    mean(dictionary.keys, keys), mean(dictionary.values, values), counts
  )
