"""A chunk of Lattice with stale gradients on a GPU: what both ways know of it.

The algebra is that of `tile.py`, for normalised columns, and of
`_chunk_kernel.py`, which takes decays apart alike: e^{G_r} e^{-G_i}. Slots are
rows of memories, `[slots, value]`, so that norms of columns are sums of rows,
which four threads have; numbers of a token and slot are `[tokens, slots]`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.lattice import columns, reference
from memcomp_kernels.pallas_gpu import gates, rows, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed

SLOTS = (64,)
DIMS = 64, 128
"""Of values: what shared memory has room for."""
LOW = "late", "early", "left", "scores", "seen", "high", "rest"
"""Of tokens and slots, or tokens, in shared memory, in the dtype of products:
of `Chunk`. Beside them `low` is of slots and values; h takes the values' place.
"""
KEPT = "share", "log", "write"
"""Of tokens and slots there, float32: p, G and w, as registers are few."""
WIDE = "end", "along"
"""Numbers of slots there, float32."""


class Writes(NamedTuple):
  """Numbers of tokens and slots, of which little is kept: made when needed.

  Attributes:
    rate: gamma.
    code: c.
    plain: a = -gamma c, what is written before contraction.
    tangent: |h - Phi p|^2.
    decay: mu^2.
    total: mu^2 + |ds|^2, or 1 where nothing is left of a column.
    sized: where it is not.
    write: w = beta a.
  """

  rate: jax.Array
  code: jax.Array
  plain: jax.Array
  tangent: jax.Array
  decay: jax.Array
  total: jax.Array
  sized: jax.Array
  write: jax.Array


class Chunk:
  """The writes of one chunk.

  Attributes:
    phi: reference to Phi, in the dtype of products.
    length: |h|^2, `[tokens, slots]`.
    lowest: G after the chunk, `[slots]`.
  """

  def __init__(
    self,
    refs: dict[str, Any],
    scalars: dict[str, jax.Array],
    spec: reference.Spec,
  ):
    self.refs, self.scalars, self.spec = refs, scalars, spec
    self.flagged = "resets" in scalars

  @property
  def complete(self) -> jax.Array | None:
    """0. where the chunk goes on in the next tile; None where none does."""
    if not self.flagged:
      return None
    return (self.scalars["complete"] != 0).astype(jnp.float32)

  @property
  def share(self) -> jax.Array:
    """Of h along Phi: p = h . Phi, `[tokens, slots]`; read again each time."""
    return self.wide("share")

  @property
  def log(self) -> jax.Array:
    """G, likewise."""
    return self.wide("log")

  @property
  def write(self) -> jax.Array:
    """w, likewise."""
    return self.wide("write")

  def store(self, name: str, x: jax.Array) -> None:
    """Writes `x` to shared memory in the dtype of the array there."""
    self.refs[name][...] = x.astype(self.refs[name].dtype)

  def wide(self, name: str) -> jax.Array:
    """An array of shared memory in float32."""
    return tile_kernel.wide(self.refs[name])

  def row(self, name: str, width: int = SLOTS[0]) -> jax.Array:
    """Numbers of tokens, or of slots, in all columns."""
    return gates.along(self.refs[name], 0, width)

  def late(self) -> jax.Array:
    """Queries as products take them, q e^G."""
    return self.wide("query") * jnp.exp(self.log)

  def find(self, phi: Any) -> None:
    """Finds the writes; `phi` is committed."""
    refs, objective = self.refs, self.spec.objective
    h = self.wide("value")
    if objective == "decoding":
      (known,) = products([(refs["key"], phi)])
      h = known - h
    elif objective == "similarity":
      h = -h
    self.phi = phi
    self.store("value", h)
    seen = triangle(self.row("rate"))
    self.store("seen", jnp.where(seen, 1.0, 0.0))
    plgpu.commit_smem()
    (share,) = products([(refs["value"], transposed(phi))])
    self.store("share", share)
    self.length = sums(h * h, share)
    log_decay = self.row("log_decay")
    of = self.writes()
    self.store("write", of.write)
    logs = log_decay - 0.5 * jnp.log(of.total)
    self.lowest = jnp.sum(logs, axis=0)
    self.store("log", self.running_sum(logs))

  def writes(self) -> Writes:
    """What the tokens of the chunk write."""
    code, rate = self.wide("key"), self.row("rate")
    if self.spec.objective == "encoding":
      code = self.share - code
    plain = -rate * code
    # Columns are of norm 1 here. Rounding may leave less than nothing.
    tangent = jnp.maximum(self.length - self.share * self.share, 0.0)
    decay = jnp.exp(2 * self.row("log_decay"))
    total = decay + plain * plain * tangent
    sized = total > columns.TINY
    total = jnp.where(sized, total, 1.0)
    write = plain * lax.rsqrt(total)
    return Writes(rate, code, plain, tangent, decay, total, sized, write)

  def lay(self) -> None:
    """Puts what products take in shared memory.

    `late` is q e^G, `early` w e^{-G}, `left` w e^{G_C - G}; by slot, `end` is
    G_C and `along` what the memory after the chunk has of Phi.
    """
    write, log = self.write, self.log
    left = write * jnp.exp(down_columns(self.lowest, log) - log)
    self.store("late", self.late())
    self.store("early", jnp.exp(-log) * write)
    self.store("left", left)
    self.store("end", self.lowest)
    self.store("along", jnp.sum(left * self.share, axis=0))

  def ratio(self) -> jax.Array:
    """The running sums of e^{-G} w p."""
    return self.running_sum(jnp.exp(-self.log) * self.write * self.share)

  def running_sum(self, x: jax.Array, reverse: bool = False) -> jax.Array:
    """Over tokens, by two products: `x` is the sum of two narrow numbers."""
    refs = self.refs
    high = x.astype(refs["high"].dtype)
    refs["high"][...] = high
    self.store("rest", x - high.astype(jnp.float32))
    plgpu.commit_smem()
    seen = transposed(refs["seen"]) if reverse else refs["seen"]
    (found,) = products([(seen, refs["high"]), (seen, refs["rest"])])
    return found

  def after(
    self, memory: jax.Array, start: jax.Array, written: jax.Array
  ) -> jax.Array:
    """S after the writes; `written` is the product of `left` and h."""
    kept, along = self.by_slot(memory)
    return kept * memory - along * start + written

  def by_slot(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the memory after the chunk has of that before, and of Phi."""
    width = memory.shape[1]
    return jnp.exp(self.row("end", width)), self.row("along", width)


def sums(x: jax.Array, like: jax.Array) -> jax.Array:
  """Of rows, in all columns of `like`."""
  return rows.along_rows(jnp.sum(x, axis=1), like)


def down_columns(x: jax.Array, like: jax.Array) -> jax.Array:
  """A number of each column in all its rows."""
  return lax.broadcast_in_dim(x, like.shape, (1,))


def triangle(x: jax.Array) -> jax.Array:
  """Where a row is not before its column."""
  row, column = (
    plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=plgpu.Layout.WGMMA)
    for axis in (0, 1)
  )
  return row >= column


def norms(
  memory: jax.Array, complete: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Inverse norms of slots on all their columns, and where there are any.

  Args:
    memory: `[slots, value]`.
    complete: 0 where the chunk goes on in the next tile: nothing has a norm
      but 1 then. None for 1.
  """
  squares = sums(memory * memory, memory)
  if complete is not None:
    squares = complete * squares + (1 - complete)
  sized = squares > columns.TINY
  return lax.rsqrt(jnp.where(sized, squares, 1.0)), sized
