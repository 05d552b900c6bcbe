"""Lattice backward on a GPU: from the last chunk to the first.

The kernel recomputes each chunk. The adjoints are those of
`lattice.pallas_tpu.chunk_start.backward`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.lattice import reference
from memcomp_kernels.lattice.pallas_gpu import chunk, forward
from memcomp_kernels.lattice.pallas_gpu.chunk import down_columns, sums
from memcomp_kernels.pallas_gpu import full_tiles, gates, starts, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed

NAME = forward.NAME
_WIDE = "d_sum_end", "d_log_end", "d_squares"
"""Names of arrays in shared memory with one number per slot."""


class _Chunk(chunk.Chunk):
  """Computes one chunk backward; see `backward`."""

  def start(self) -> Any:
    """Returns the reference to Phi, not yet committed."""
    if not self.flagged:
      return self.refs["saved"]
    lax.cond(
      self.scalars["continues"] != 0,
      lambda: self.store("phi", tile_kernel.load(self.refs[f"start_{NAME}"])),
      lambda: self.store("phi", self.wide("saved")),
    )
    return self.refs["phi"]

  def column(self, name: str) -> jax.Array:
    """Broadcasts numbers of slots to all rows of tokens."""
    return gates.along(self.refs[name], 1, full_tiles.TOKENS)

  def run(self, carry: tile_kernel.Carry) -> tile_kernel.Carry:
    refs, scalars = self.refs, self.scalars
    phi = self.start()
    plgpu.commit_smem()
    self.find(phi)
    self.lay()
    plgpu.commit_smem()
    d_memory, d_phi = self.through_norms(carry[0])
    # The adjoints of the reads of the memory and of Phi.
    ratio = self.ratio()
    self.store("scores", self.late() * ratio)
    plgpu.commit_smem()
    d_along, into_memory, into_phi = products(
      [(refs["d_output"], transposed(phi))],
      [(transposed(refs["late"]), refs["d_output"])],
      [(transposed(refs["scores"]), refs["d_output"])],
    )
    d_memory, d_phi = d_memory + into_memory, d_phi - into_phi
    d_sum = self.running_sum(-self.late() * d_along, reverse=True)
    by_along = ratio * d_along
    d_scores, scores = products(
      [(refs["d_output"], transposed(refs["value"]))],
      [(refs["late"], transposed(refs["early"]))],
    )
    seen = chunk.triangle(scores)
    self.store("scores", jnp.where(seen, scores, 0.0))
    self.store("d_scores", jnp.where(seen, d_scores, 0.0))
    plgpu.commit_smem()
    (d_late,) = products(
      [
        (refs["d_output"], transposed(refs["saved"])),
        (refs["d_scores"], refs["early"]),
      ]
    )
    d_query = jnp.exp(self.log) * (d_late - by_along)
    d_log = self.wide("query") * d_query
    self.store("d_query", d_query)
    met, d_left = products(
      [(transposed(refs["d_scores"]), refs["late"])],
      [(refs["value"], transposed(refs["low"]))],
    )

    write, log = self.write, self.log
    down = jnp.exp(-log)
    by_end = jnp.exp(down_columns(self.lowest, log) - log) * d_left
    d_sum = d_sum + self.column("d_sum_end")
    d_write = down * (met + self.share * d_sum) + by_end
    d_share = down * write * d_sum
    by_end = down_columns(jnp.sum(write * by_end, axis=0), log)
    d_log = self.running_sum(d_log - write * d_write, reverse=True)
    d_log = d_log + self.column("d_log_end") + by_end
    d_tangent, d_share, d_key = self.through_writes(d_log, d_write, d_share)

    self.store("late", d_share)
    plgpu.commit_smem()
    d_h, into_phi = products(
      [
        (transposed(refs["scores"]), refs["d_output"]),
        (refs["left"], refs["low"]),
        (refs["late"], phi),
      ],
      [(transposed(refs["late"]), refs["value"])],
    )
    d_h = d_h + 2 * self.wide("value") * sums(d_tangent, d_h)
    d_phi = d_phi + into_phi
    d_phi = d_phi + 2 * self.row(
      "d_squares", d_phi.shape[1]
    ) * tile_kernel.wide(phi)
    if self.spec.objective == "decoding":
      self.store("value", d_h)
      plgpu.commit_smem()
      by_h, into_phi = products(
        [(refs["value"], transposed(phi))],
        [(transposed(refs["key"]), refs["value"])],
      )
      d_key, d_phi = d_key + by_h, d_phi + into_phi
    self.store("d_key", d_key)
    self.store("d_value", d_h if self.spec.objective == "encoding" else -d_h)
    return (starts.leave(refs, scalars, NAME, d_memory, d_phi),)

  def through_norms(self, d_after: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Distributes the adjoint of the memory after the chunk.

    The method stores the adjoint of S after the writes in `low`. That adjoint
    also reaches all tokens' running sums and their G. These parts are stored by
    slot in `d_sum_end` and `d_log_end`, because the sums after the last token
    run over all tokens.

    Returns:
      The parts for the memory before the tile and for Phi.
    """
    refs = self.refs
    (written,) = products([(transposed(refs["left"]), refs["value"])])
    memory, start = self.wide("saved"), tile_kernel.wide(self.phi)
    after = self.after(memory, start, written)
    complete = self.complete
    inverse, sized = chunk.norms(after, complete)
    normal = inverse * after
    along = sums(normal * d_after, normal)
    if complete is not None:
      along = complete * along
    d_normal = inverse * (d_after - normal * along)
    d_normal = jnp.where(sized, d_normal, 0.0)
    d_fallback = jnp.where(sized, 0.0, d_after)
    self.store("low", d_normal)
    kept, along = self.by_slot(memory)
    by_start = jnp.sum(-kept * start * d_normal, axis=1)
    self.store("d_sum_end", by_start)
    by_both = (kept * memory - along * start) * d_normal
    self.store("d_log_end", jnp.sum(by_both, axis=1))
    return kept * d_normal, d_fallback - along * d_normal

  def through_writes(
    self, d_log: jax.Array, d_write: jax.Array, d_share: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns adjoints of |h|^2 (by slot), p and the key; stores the gates'.

    Args:
      d_log: Adjoint of a token's log decay, which includes that of log beta.
      d_write: Adjoint of w.
      d_share: Adjoint of p.
    """
    of = self.writes()
    inverse = lax.rsqrt(of.total)
    d_total = -0.5 * (d_log + of.write * d_write) * inverse * inverse
    d_total = jnp.where(of.sized, d_total, 0.0)
    self.store("d_log_decay", jnp.sum(d_log + 2 * of.decay * d_total, axis=1))
    d_plain = d_write * inverse + 2 * of.plain * of.tangent * d_total
    self.store("d_rate", jnp.sum(-of.code * d_plain, axis=1))
    d_tangent = of.plain * of.plain * d_total
    d_tangent = jnp.where(of.tangent > 0, d_tangent, 0.0)
    share = self.share
    d_share = d_share - 2 * share * d_tangent
    self.store("d_squares", jnp.sum(share * share * d_tangent, axis=0))
    d_code = -of.rate * d_plain
    if self.spec.objective == "encoding":
      return d_tangent, d_share + d_code, -d_code
    return d_tangent, d_share, d_code


def backward(
  operands: dict[str, jax.Array], spec: reference.Spec
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: The operands of `forward` except `memory` and `reset_memory`. By
      tile, there are also `saved`, from `forward`, and `d_output`, in the dtype
      of values. Memories are `d_final` and, with flags, `d_last_memory`.
    spec: Options that define the memory.

  Returns:
    Adjoints by name. `d_query`, `d_key` and `d_value` are by tile, in the dtype
    of values. `d_log_decay` and `d_rate` are by tile, float32. `d_memory` and,
    with flags, `d_reset_memory` and `d_start_memory` are memories.
  """
  value, memory = operands["value"], operands["d_final"]
  flagged = "resets" in operands
  results = {
    f"d_{name}": jax.ShapeDtypeStruct(
      operands[name].shape, operands[name].dtype
    )
    for name in ("query", "key", "value", "log_decay", "rate")
  }
  results["d_memory"] = jax.ShapeDtypeStruct(memory.shape, memory.dtype)
  names = ["d_final", "d_memory"]
  zeroed = []
  if flagged:
    zeroed = [f"d_reset_{NAME}", f"d_start_{NAME}"]
    names += [f"start_{NAME}", f"d_last_{NAME}", *zeroed]
    results |= dict.fromkeys(zeroed, results["d_memory"])
  local = forward.local(operands, flagged)
  local["d_scores"] = local["scores"]
  local |= dict.fromkeys(_WIDE, local["end"])
  return tile_kernel.run(
    lambda refs, scalars, carry: _Chunk(refs, scalars, spec).run(carry),
    "lattice_backward",
    operands,
    results,
    heads=value.shape[2],
    memories=names,
    carried=[("d_final", "d_memory")],
    local=local,
    in_place={f"d_{x}": x for x in ("query", "key", "value")},
    zeroed=zeroed,
    reverse=True,
  )
