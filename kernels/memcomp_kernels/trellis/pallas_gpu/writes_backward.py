"""Trellis's writes on a GPU, backward: from the last tile to the first.

As forward, a thread block has one pass of one head. `reads_backward` has
computed, for each tile, the adjoints of memories and directions through the
reads. So the chain from tile to tile is the adjoint of the writes alone. The
kernel recomputes pre-activations. With gradients per token, the forward kernel
saved the directions, and `sweeps` solves for adjoints between tokens. The
rates' adjoint uses the directions without rates.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.pallas_gpu import (
  full_tiles,
  gates,
  rows,
  starts,
  tile_kernel,
)
from memcomp_kernels.pallas_gpu.products import products, transposed
from memcomp_kernels.trellis import reference
from memcomp_kernels.trellis.pallas_gpu import sweeps
from memcomp_kernels.trellis.pallas_gpu.writes import NAME, gate_kinds


def adjoint_kinds(block: int | None) -> tuple[str, ...]:
  """Names of the parts of `d_gates`, by token and summed over slots.

  "rate": directions without rates, times their adjoints. "end": the same for
  what reaches the tile's end. "before", only with gradients per token: z times
  its adjoint, because z contains the decay up to the token before.
  """
  return ("rate", "end") if block is None else ("rate", "end", "before")


class _Tile:
  """Computes one tile; see `backward`."""

  def __init__(self, refs, scalars, spec, block):
    refs = refs | gates.parts(refs["gates"], gate_kinds(block))
    kinds = [f"d_{kind}" for kind in adjoint_kinds(block)]
    refs |= gates.parts(refs["d_gates"], kinds)
    self.refs, self.scalars = refs, scalars
    self.spec, self.block = spec, block

  def store(self, name: str, x: jax.Array) -> None:
    self.refs[name][...] = x.astype(self.refs[name].dtype)

  def wide(self, name: str) -> jax.Array:
    return tile_kernel.wide(self.refs[name])

  def row(self, name: str) -> jax.Array:
    return gates.along(self.refs[name], 0, self.refs["target"].shape[-1])

  def start(self) -> Any:
    """Returns the memory at which gradients are taken, not yet committed."""
    saved = self.refs["saved"]
    if "continues" not in self.scalars:
      return saved
    start = lax.cond(
      self.scalars["continues"] != 0,
      lambda: tile_kernel.load(self.refs[f"start_{NAME}"]),
      lambda: tile_kernel.wide(saved),
    )
    self.store("at", start)
    return self.refs["at"]

  def loss(self) -> tuple[str, jax.Array, jax.Array, float]:
    """Returns a direction's arguments, loaded anew, as registers are few."""
    z, target = self.wide("z"), self.wide("target")
    return self.spec.phi, z, target, self.spec.phi_eps

  def run(self, carry: tile_kernel.Carry) -> tile_kernel.Carry:
    """Maps the adjoint of the memory after the tile to that before it."""
    refs, scalars = self.refs, self.scalars
    (d_after,) = carry
    written, low = refs["written"], refs["low"]
    self.store("low", d_after)
    d_memory = scalars["total"] * d_after + self.wide("d_memory")
    if "rest" in refs:  # registers are few, so shared memory holds this
      self.store("rest", d_memory)
    start = self.start()
    kept = self.wide("saved") * d_after
    self.store("d_total", jnp.sum(kept, axis=0))
    plgpu.commit_smem()
    squared = [] if self.block is None else [[(written, transposed(written))]]
    seen, z, *coupled = products(
      [(written, transposed(low))], [(written, transposed(start))], *squared
    )
    if self.block is not None:
      z = self.after_tokens(z, *coupled)
    self.store("z", z)
    plgpu.commit_smem()
    seen = self.row("to_end") * seen
    by_rate = self.wide("d_u") - seen
    direction = self.direction()
    self.store("d_end", jnp.sum(seen * direction, axis=1))
    u = direction * self.row("rate") if self.block is None else self.wide("u")
    self.store("u_end", -(u * self.row("to_end")))
    if self.block is not None:
      by_rate = sweeps.solve_transposed(
        refs,
        by_rate,
        lambda by_rate: self.pull(by_rate)[0],
        self.block,
      )
      direction = self.direction()
    self.store("d_rate", jnp.sum(by_rate * direction, axis=1))
    dz, d_target = self.pull(by_rate)
    self.store("d_target", d_target)
    if self.block is not None:
      dz = self.before_tokens(dz)
    self.store("dz", dz)
    plgpu.commit_smem()
    into_written = [(refs["dz"], start), (refs["u_end"], low)]
    if self.block is not None:
      coupling = refs["coupling"]
      into_written += [(coupling, written), (transposed(coupling), written)]
    d_written, by_z = products(
      into_written, [(transposed(refs["dz"]), written)]
    )
    self.store("d_written", d_written)
    if "rest" in refs:
      d_memory = self.wide("rest")
    return (starts.leave(refs, scalars, NAME, d_memory, by_z),)

  def after_tokens(self, z: jax.Array, scores: jax.Array) -> jax.Array:
    """Returns pre-activations for gradients per token; stores `coupling`.

    Args:
      z: M w.
      scores: w_t . w_i.
    """
    refs = self.refs
    sweeps.couple(refs, scores, self.block)
    plgpu.commit_smem()
    (found,) = products([(refs["coupling"], refs["u"])])
    return sweeps.from_start(refs, z.shape[1]) * z - found

  def before_tokens(self, dz: jax.Array) -> jax.Array:
    """Returns the adjoint of M w; stores that of w_t . w_i in `coupling`.

    Args:
      dz: Adjoint of pre-activations, which the reference `dz` also holds.
    """
    refs = self.refs
    self.store("d_before", jnp.sum(dz * self.wide("z"), axis=1))
    (d_coupling,) = products([(refs["dz"], transposed(refs["u"]))])
    between = sweeps.between(refs, self.block)
    self.store("coupling", -(d_coupling * between))
    return dz * sweeps.from_start(refs, dz.shape[1])

  def direction(self) -> jax.Array:
    """Returns directions without rates."""
    return rows.write_direction(*self.loss())

  def pull(self, by_rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the adjoints of z and targets from that of the directions."""
    dz, d_target = rows.write_direction_adjoint(
      *self.loss(), self.row("rate") * by_rate
    )
    if self.spec.first_order:
      dz = jnp.zeros_like(dz)
    return dz, d_target


def backward(
  operands: dict[str, jax.Array], spec: reference.Spec, block: int | None
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: The operands of `forward` except `memory` and `reset_memory`.
      There are also `saved` by tile and, with gradients per token, `u`. `d_u`
      and `d_memory` are their adjoints through reads. `d_final` is the adjoint
      of `final` and, with `last`, `d_last_memory` that of `last_memory`.
    spec: Options that define the memory.
    block: Result of `tiles.block_of`.

  Returns:
    Adjoints by name. `d_written` is that of `written` through writes, and
    `d_target` is that of each pass, shaped as `d_u`. Each has the dtype of its
    operand. `d_gates` is float32 `[tiles, batch, 2 * heads, adjoint_kinds *
    tile]`. `d_total` is float32 `[tiles, batch, 2 * heads, width]`: memories
    times their adjoints after the tile, summed over slots. `d_first` is the
    adjoint of the memory before the first tile. With `resets` there is
    `d_reset_memory`, with `last` `d_start_memory`.
  """
  written, final = operands["written"], operands["d_final"]
  shape, dtype = written.shape, written.dtype
  d_u = operands["d_u"]
  kinds = len(adjoint_kinds(block))
  of_u = jax.ShapeDtypeStruct(d_u.shape[3:], dtype)
  memory = jax.ShapeDtypeStruct(final.shape, final.dtype)
  low = jax.ShapeDtypeStruct(final.shape[2:], dtype)
  z = jax.ShapeDtypeStruct(of_u.shape, final.dtype)
  local = {"z": z, "low": low, "dz": of_u, "u_end": of_u}
  if low.size <= full_tiles.TOKENS**2:  # otherwise there is no room for it
    local["rest"] = jax.ShapeDtypeStruct(low.shape, final.dtype)
  results = {
    "d_written": jax.ShapeDtypeStruct(shape, dtype),
    # It may overwrite `target`, so it has that dtype.
    "d_target": jax.ShapeDtypeStruct(d_u.shape, operands["target"].dtype),
    "d_gates": jax.ShapeDtypeStruct(
      (*shape[:3], kinds * shape[3]), final.dtype
    ),
    "d_total": jax.ShapeDtypeStruct((*shape[:3], shape[4]), final.dtype),
    "d_first": memory,
  }
  if block is not None:
    local["coupling"] = jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype)
  zeroed = []
  if "resets" in operands:
    zeroed.append(f"d_reset_{NAME}")
  if "last" in operands:
    local["at"] = low
    zeroed.append(f"d_start_{NAME}")
  results |= dict.fromkeys(zeroed, memory)
  given = ("d_final", "d_first", f"start_{NAME}", f"d_last_{NAME}")
  return tile_kernel.run(
    lambda refs, scalars, carry: _Tile(refs, scalars, spec, block).run(carry),
    "trellis_writes_backward",
    operands,
    results,
    heads=shape[2],
    local=local,
    memories=[*given, *zeroed],
    carried=[("d_final", "d_first")],
    # The body does not read these operands after it stores their adjoints.
    in_place={"d_written": "written", "d_target": "target"},
    zeroed=zeroed,
    reverse=True,
  )
