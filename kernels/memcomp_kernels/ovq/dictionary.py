"""The dictionary: which row each token of a chunk joins, and the new means.

With m rows in use and m' after the chunk, the n = m' - m tokens whose best
product with a row is smallest found rows of their own, in that order; all
others join the row that they have the largest product with. An empty dictionary
is founded by the chunk's first token, and products are with that one.

Each row is the mean of all its tokens: with c tokens so far and s of the
chunk's, (c d + sum) / (c + s). Which row a token joins has no derivative.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
  from memcomp_kernels.ovq import reference

# A token that joins another row than the definition's is no rounding error.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Dictionary(NamedTuple):
  """See `reference.State`."""

  keys: jax.Array
  values: jax.Array
  counts: jax.Array


def rows_in_use(counts: jax.Array, spec: "reference.Spec") -> jax.Array:
  """Rows in use, int32 `[batch, heads]`."""
  tokens = jnp.sum(lax.stop_gradient(counts), axis=-1)
  return spec.rows(jnp.round(tokens).astype(jnp.int32))


def log_counts(counts: jax.Array, spec: "reference.Spec") -> jax.Array:
  """What is added to the scores of rows, -inf for those not in use."""
  place = jnp.arange(counts.shape[-1])
  used = (place < rows_in_use(counts, spec)[..., None]) & (counts > 0)
  bias = jnp.log(jnp.where(used, counts, 1)) if spec.count_bias else 0.0
  return jnp.where(used, bias, -jnp.inf)


def assign(
  dictionary: Dictionary, keys: jax.Array, spec: "reference.Spec"
) -> jax.Array:
  """The row that each token joins, int32 `[batch, heads, chunk]`.

  Args:
    dictionary: before the chunk.
    keys: of the chunk's tokens, `[batch, heads, chunk, key]`.
    spec: the memory's options.
  """
  rows, keys = lax.stop_gradient((dictionary.keys, keys))
  chunk = keys.shape[-2]
  used = rows_in_use(dictionary.counts, spec)
  tokens = jnp.sum(lax.stop_gradient(dictionary.counts), axis=-1)
  after = spec.rows(jnp.round(tokens).astype(jnp.int32) + chunk)

  products = _einsum("bhtk,bhnk->bhtn", keys, rows)
  in_use = jnp.arange(rows.shape[-2]) < used[..., None, None]
  products = jnp.where(in_use, products, -jnp.inf)
  best, joined = jnp.max(products, -1), jnp.argmax(products, -1)
  with_first = _einsum("bhtk,bhk->bht", keys, keys[..., 0, :])
  with_first = with_first.at[..., 0].set(jnp.inf)
  empty = used == 0
  best = jnp.where(empty[..., None], with_first, best)
  # The first token's row is there already.
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
  """The dictionary after a whole chunk of tokens.

  Args:
    dictionary: before the chunk.
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
  # Empty rows stay as they are. No maximum: counts of 1 would sit in its kink.
  share = (1 / jnp.where(counts > 0.5, counts, 1))[..., None]

  def mean(old, new):
    sums = _einsum("bhtn,bhtd->bhnd", joins, new)
    found = old + share * (sums - joined[..., None] * old)
    if not spec.normalize_rows:
      return found
    square = jnp.sum(found * found, axis=-1, keepdims=True)
    return found / jnp.sqrt(jnp.where(square > 0, square, 1))

  return Dictionary(
    mean(dictionary.keys, keys), mean(dictionary.values, values), counts
  )
