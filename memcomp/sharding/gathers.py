"""Gathers embedding tables once per step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from memcomp.sharding import axes


def gathered(table: jax.Array, dtype: str, rules: axes.Rules) -> jax.Array:
  """Gathers a table `[vocab, features]` to every shard of rows and time.

  The table crosses the mesh once. So does the sum of the gradients of all its
  uses, in `dtype` like those of other weights. The partitioner would reduce the
  whole table for each use. Each shard sums in float32.

  Args:
    table: embedding table, float32.
    dtype: dtype of the computation.
    rules: sharding of batch, time, vocab and embed.

  Returns:
    `[shards, vocab, features]` for `per_shard`: values of `dtype` in the dtype
    of the given table.
  """
  mesh = rules.active_mesh()
  if mesh is None:
    return table.astype(dtype).astype(table.dtype)[None]

  def whole(table):
    # A separate shard axis prevents TPUs from reducing the whole gradient.
    parts = table.astype(dtype).T[None]
    if embed := rules.axes("embed"):
      parts = jax.lax.all_gather(parts[0], embed)
    parts = parts.reshape(-1, parts.shape[-1]).T[None]
    return parts.astype(table.dtype)

  shards = (*rules.axes("batch"), *rules.axes("time"))
  return jax.shard_map(
    whole,
    mesh=mesh,
    in_specs=rules.spec("vocab", "embed"),
    out_specs=PartitionSpec(shards, *rules.spec("vocab", None)),
    # The check cannot prove that unnamed axes hold equal values.
    check_vma=False,
  )(table)


def per_shard(
  function: Callable[[jax.Array, jax.Array], jax.Array],
  table: jax.Array,
  rows: jax.Array,
  rules: axes.Rules,
) -> jax.Array:
  """Returns `function(table, rows)`, with each shard's rows and table.

  Args:
    function: maps one table and some rows to rows.
    table: `[shards, ...]`, from `gathered`, or of one shard.
    rows: `[batch, time, ...]`.
    rules: sharding of batch and time.
  """
  mesh = rules.active_mesh()
  if len(table) == 1 or mesh is None:
    return function(table[0], rows)
  batch, time = rows.shape[:2]
  shards = rules.shards("time")
  if time % shards:  # few tokens, as in the last chunk of a loss
    table, shards = table[::shards], 1

  def as_batch(x):
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2)
    laid = rules.spec("batch", "time" if shards > 1 else None)
    place = NamedSharding(mesh, PartitionSpec(*laid, *free))
    return jax.lax.with_sharding_constraint(x, place)

  cut = len(table) // shards, -1, shards, time // shards
  parts = jnp.moveaxis(as_batch(rows).reshape(*cut, *rows.shape[2:]), 2, 1)
  y = jax.vmap(function)(table, parts.reshape(len(table), *parts.shape[2:]))
  y = jnp.moveaxis(y.reshape(*parts.shape[:2], *y.shape[1:]), 1, 2)
  return as_batch(y.reshape(batch, time, *y.shape[4:]))
