"""A chunk of Lattice with gradients at its start, on a GPU.

Both directions share this code. The algebra is that of `lattice.tile`, for
normalised columns. Decays are factored as in `lattice.pallas_tpu.chunk_start`:
e^{G_r} e^{-G_i}. Slots are rows of memories, `[slots, value]`, so that norms of
columns are sums of rows, each held by four threads. Numbers by token and slot
are `[tokens, slots]`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.lattice import reference
from memcomp_kernels.pallas_gpu import gates, rows, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed

SLOTS = (64,)
DIMS = 64, 128
"""Supported widths of values, for which shared memory has room."""
LOW = "late", "early", "left", "scores", "seen", "high", "rest"
"""Arrays of `Chunk` in shared memory, by token and slot, or by two tokens.

They have the dtype of products. There is also `low`, by slot and value. h
overwrites the values."""
KEPT = "share", "log", "write"
"""Float32 arrays in shared memory, by token and slot: p, G and w.

They are there because registers are few."""
WIDE = "end", "along"
"""Float32 arrays in shared memory, with one number per slot."""


class Writes(NamedTuple):
  """Numbers by token and slot, recomputed when needed to save registers.

  Attributes:
    rate: gamma.
    code: c.
    plain: a = -gamma c, the factor of the write before the contraction.
    tangent: |h - Phi p|^2.
    decay: mu^2.
    total: mu^2 + |ds|^2, or 1 where nothing remains of a column.
    sized: Whether something remains of the column.
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
    phi: Reference to Phi, in the dtype of products.
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
    """Returns 0. if the chunk continues in the next tile, otherwise 1.

    The result is None if no chunk continues.
    """
    if not self.flagged:
      return None
    return (self.scalars["complete"] != 0).astype(jnp.float32)

  @property
  def share(self) -> jax.Array:
    """Products of h with Phi, p = h . Phi, `[tokens, slots]`; loaded anew."""
    return self.wide("share")

  @property
  def log(self) -> jax.Array:
    """G, `[tokens, slots]`; loaded anew."""
    return self.wide("log")

  @property
  def write(self) -> jax.Array:
    """w, `[tokens, slots]`; loaded anew."""
    return self.wide("write")

  def store(self, name: str, x: jax.Array) -> None:
    """Stores `x` in shared memory, in the dtype of the array there."""
    self.refs[name][...] = x.astype(self.refs[name].dtype)

  def wide(self, name: str) -> jax.Array:
    """Loads an array from shared memory as float32."""
    return tile_kernel.wide(self.refs[name])

  def row(self, name: str, width: int = SLOTS[0]) -> jax.Array:
    """Broadcasts numbers of tokens, or of slots, to all columns."""
    return gates.along(self.refs[name], 0, width)

  def late(self) -> jax.Array:
    """Returns queries as matmuls use them, q e^G."""
    return self.wide("query") * jnp.exp(self.log)

  def find(self, phi: Any) -> None:
    """Computes the writes; `phi` is committed."""
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
    """Returns what the tokens of the chunk write."""
    code, rate = self.wide("key"), self.row("rate")
    if self.spec.objective == "encoding":
      code = self.share - code
    plain = -rate * code
    # Columns have norm 1 here. Rounding may make the difference negative.
    tangent = jnp.maximum(self.length - self.share * self.share, 0.0)
    decay = jnp.exp(2 * self.row("log_decay"))
    total = decay + plain * plain * tangent
    sized = total > reference.TINY
    total = jnp.where(sized, total, 1.0)
    write = plain * lax.rsqrt(total)
    return Writes(rate, code, plain, tangent, decay, total, sized, write)

  def lay(self) -> None:
    """Stores the operands of matmuls in shared memory.

    `late` is q e^G, `early` is w e^{-G} and `left` is w e^{G_C - G}. By slot,
    `end` is G_C and `along` is the factor of Phi in the memory after the chunk.
    """
    write, log = self.write, self.log
    left = write * jnp.exp(down_columns(self.lowest, log) - log)
    self.store("late", self.late())
    self.store("early", jnp.exp(-log) * write)
    self.store("left", left)
    self.store("end", self.lowest)
    self.store("along", jnp.sum(left * self.share, axis=0))

  def ratio(self) -> jax.Array:
    """Returns the running sums of e^{-G} w p."""
    return self.running_sum(jnp.exp(-self.log) * self.write * self.share)

  def running_sum(self, x: jax.Array, reverse: bool = False) -> jax.Array:
    """Sums over tokens by two matmuls; `x` is split into two narrow numbers."""
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
    """Returns S after the writes; `written` is the product of `left` and h."""
    kept, along = self.by_slot(memory)
    return kept * memory - along * start + written

  def by_slot(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factors of the memory before the chunk, and of Phi.

    They are their factors in the memory after the chunk.
    """
    width = memory.shape[1]
    return jnp.exp(self.row("end", width)), self.row("along", width)


def sums(x: jax.Array, like: jax.Array) -> jax.Array:
  """Sums rows; each sum fills all columns of `like`."""
  return rows.along_rows(jnp.sum(x, axis=1), like)


def down_columns(x: jax.Array, like: jax.Array) -> jax.Array:
  """Broadcasts one number per column to all rows."""
  return lax.broadcast_in_dim(x, like.shape, (1,))


def triangle(x: jax.Array) -> jax.Array:
  """Returns where a row is not before its column."""
  row, column = (
    plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=plgpu.Layout.WGMMA)
    for axis in (0, 1)
  )
  return row >= column


def norms(
  memory: jax.Array, complete: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns inverse norms of slots on all columns, and which have a norm.

  Args:
    memory: Memory, `[slots, value]`.
    complete: 0 if the chunk continues in the next tile: all norms are then 1.
      None stands for 1.
  """
  squares = sums(memory * memory, memory)
  if complete is not None:
    squares = complete * squares + (1 - complete)
  sized = squares > reference.TINY
  return lax.rsqrt(jnp.where(sized, squares, 1.0)), sized
