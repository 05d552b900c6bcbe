"""Trellis backward on a GPU: from the last tile to the first, each recomputed.

The adjoints are those of `_backward_kernel.py`. Both passes end alike: what
reads (dR, or F) and what it reads for (q, or dY) give the adjoints of what was
written and of the memory, so that they take turns in the same shared memory.
Rates are taken into the directions, whose adjoint without them is the rates'.
With gradients per token directions are not recomputed but kept, and what one
token's owes to another's comes by `_gpu_sweeps`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.primitives.mosaic_gpu import (
  full_tiles,
  gates,
  rows,
  starts,
  tile_kernel,
)
from memcomp_kernels.primitives.mosaic_gpu.products import (
  products,
  transposed,
)
from memcomp_kernels.trellis import _gpu_sweeps, types
from memcomp_kernels.trellis._gpu_forward_kernel import GATES, NAMES

_ADJOINTS = "reads", "rate", "end"
"""Of the gates of each pass, by token and summed over slots: reads times their
adjoints; directions without rates times their adjoints; the same of what
reaches the tile's end."""


def adjoint_kinds(spec: types.Spec) -> tuple[str, ...]:
  """What `d_gates_` of each pass hold, by token.

  With gradients per token also z times its adjoint, as it has the decay up to
  the token before.
  """
  return _ADJOINTS if spec.stale else (*_ADJOINTS, "before")


class _Tile:
  """One tile, backward; see `backward`."""

  def __init__(self, refs, scalars, spec):
    refs = refs | gates.parts(refs, "gates", GATES)
    adjoints = [f"d_{kind}" for kind in adjoint_kinds(spec)]
    refs |= gates.parts(refs, "d_gates", adjoints)
    self.refs, self.scalars, self.spec = refs, scalars, spec

  def store(self, name: str, x: jax.Array) -> None:
    self.refs[name][...] = x.astype(self.refs[name].dtype)

  def row(self, name: str) -> jax.Array:
    return gates.along(self.refs[name], 0, self.refs["target"].shape[-1])

  def between(self, name: str) -> jax.Array:
    return gates.between(self.refs[f"log_{name}"], self.refs[f"since_{name}"])

  def start(self, name: str) -> Any:
    """The memory that gradients are taken at; to be committed."""
    saved = self.refs[f"saved_{name}"]
    if "continues" not in self.scalars:
      return saved
    start = lax.cond(
      self.scalars["continues"] != 0,
      lambda: tile_kernel.load(self.refs[f"start_{name}"]),
      lambda: tile_kernel.wide(saved),
    )
    place = f"start_{saved.shape[1]}"
    self.store(place, start)
    return self.refs[place]

  def loss(self, z: jax.Array) -> tuple[str, jax.Array, jax.Array, float]:
    """What a direction is of; targets are read again, not kept in registers."""
    return (
      self.spec.phi,
      z,
      tile_kernel.wide(self.refs["target"]),
      self.spec.phi_eps,
    )

  def direct(self, name: str, z: jax.Array) -> None:
    rate = self.row(f"rate_{name}")
    self.store(f"u_{name}", rows.write_direction(*self.loss(z)) * rate)

  def prepare(self) -> tuple[jax.Array, jax.Array]:
    """Finds directions, or couplings; a read and scores of the key pass."""
    refs = self.refs
    asked = [
      [(refs["query"], transposed(refs["saved_key"]))],
      [(refs["query"], transposed(refs["key"]))],
    ]
    if not self.spec.stale:
      read, scores, *coupled = products(
        *asked, *([(refs[name], transposed(refs[name]))] for name in NAMES)
      )
      for name, found in zip(NAMES, coupled, strict=True):
        _gpu_sweeps.couple(refs, name, found)
      return read, scores
    start = self.start("value")
    plgpu.commit_smem()
    (z,) = products([(refs["value"], transposed(start))])
    self.direct("value", z)
    start = self.start("key")
    plgpu.commit_smem()
    z, read, scores = products([(refs["key"], transposed(start))], *asked)
    self.direct("key", z)
    return read, scores

  def run(self, d_after: tile_kernel.Carry) -> tile_kernel.Carry:
    """Adjoints of the memories after the tile to those before it."""
    refs, spec = self.refs, self.spec
    read, scores = self.prepare()
    self.store("scores_key", scores * self.between("key"))
    plgpu.commit_smem()
    found, scores, d_code = products(
      [(refs["scores_key"], refs["u_key"])],
      [(refs["d_output"], transposed(refs["value"]))],
      [(refs["d_output"], transposed(refs["saved_value"]))],
    )
    read = jnp.exp(self.row("log_key")) * read - found
    activation = spec.read_activation, read, spec.read_eps
    code = rows.activate(*activation)
    self.store("reader_value", code)
    self.store("scores_value", scores * self.between("value"))
    plgpu.commit_smem()
    (found,) = products([(refs["scores_value"], refs["u_value"])])
    d_code = jnp.exp(self.row("log_value")) * d_code - found
    d_read = rows.activate_adjoint(*activation, d_code)
    self.store("reader_key", d_read)
    self.store("d_reads_value", jnp.sum(d_code * code, axis=1))
    self.store("d_reads_key", jnp.sum(d_read * read, axis=1))

    d_key, d_value = d_after
    d_value, by_value = self.finish("value", "d_output", d_value)
    d_key, by_key = self.finish("key", "query", d_key)
    self.store("d_target", by_key + by_value)
    return d_key, d_value

  def finish(
    self, name: str, asker: str, d_after: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Adjoints that a pass leaves: of its memory before, and of targets.

    Args:
      name: the pass.
      asker: what its reads are for: the query, or the output's adjoint.
      d_after: the adjoint of its memory after the tile.
    """
    refs, scalars = self.refs, self.scalars
    saved, scores, u = (refs[f"{x}_{name}"] for x in ("saved", "scores", "u"))
    written, reader = refs[name], refs[f"reader_{name}"]
    low = refs[f"low_{saved.shape[1]}"]
    low[...] = d_after.astype(low.dtype)
    start = self.start(name)
    self.store(
      f"d_total_{name}", jnp.sum(tile_kernel.wide(saved) * d_after, axis=0)
    )
    plgpu.commit_smem()
    of_z = [(written, transposed(start))]
    of_scores = [(reader, transposed(u))]
    found, seen, z, *rest = products(
      [(transposed(scores), reader)],
      [(written, transposed(low))],
      of_z,
      *([of_scores] if self.spec.stale else [[(refs[f"coupling_{name}"], u)]]),
    )
    to_end = self.row(f"to_end_{name}")
    seen = to_end * seen
    by_rate = -found - seen
    if self.spec.stale:
      (d_scores,) = rest
      dz, d_target = self.pull(name, z, by_rate)
      self.store("dz", dz)
    else:
      z = _gpu_sweeps.from_start(refs, name, z.shape[1]) * z - rest.pop()
      by_rate, d_target, d_scores = self.between_tokens(
        name, z, by_rate, of_scores
      )
    direction = rows.write_direction(*self.loss(z))
    self.store(f"d_rate_{name}", jnp.sum(by_rate * direction, axis=1))
    self.store(f"d_end_{name}", jnp.sum(seen * direction, axis=1))
    self.store(f"scores_{name}", -(d_scores * self.between(name)))
    self.store(f"u_{name}", -(tile_kernel.wide(u) * to_end))
    from_start = jnp.exp(self.row(f"log_{name}"))
    self.store(f"reader_{name}", tile_kernel.wide(reader) * from_start)
    plgpu.commit_smem()
    by_read = transposed(reader), refs[asker]
    by_z = transposed(refs["dz"]), written
    apart = "continues" in scalars
    into_memory = [[by_read], [by_z]] if apart else [[by_read, by_z]]
    into_written = [
      (refs["dz"], start),
      (transposed(scores), refs[asker]),
      (u, low),
    ]
    if not self.spec.stale:
      coupling = refs[f"coupling_{name}"]
      into_written += [(coupling, written), (transposed(coupling), written)]
    into_query = [(reader, saved), (scores, written)]
    d_written, d_memory, *rest = products(
      into_written, *into_memory, *([into_query] if name == "key" else [])
    )
    self.store(f"d_{name}", d_written)
    if name == "key":
      self.store("d_query", rest.pop())
    d_memory = scalars[f"total_{name}"] * d_after + d_memory
    if apart:
      d_memory = starts.leave(refs, scalars, name, d_memory, rest.pop())
    else:
      d_memory = starts.leave_segment(refs, scalars, name, d_memory)
    return d_memory, d_target

  def between_tokens(
    self,
    name: str,
    z: jax.Array,
    by_rate: jax.Array,
    of_scores: list[tuple[Any, Any]],
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What directions owe to those of tokens before, with gradients per token.

    Leaves the adjoint of M w in `dz`, and that of w_t . w_i in `coupling_`.

    Args:
      name: the pass.
      z: its pre-activations.
      by_rate: the adjoint of its directions by reads and the memory alone.
      of_scores: the product of the scores' adjoint.

    Returns:
      The adjoints of directions, of targets and of scores.
    """
    refs = self.refs
    by_rate = _gpu_sweeps.solve_transposed(
      refs, name, by_rate, lambda by_rate: self.pull(name, z, by_rate)[0]
    )
    dz, d_target = self.pull(name, z, by_rate)
    self.store(f"d_before_{name}", jnp.sum(dz * z, axis=1))
    d_scores, d_coupling = products(
      of_scores, [(refs["dz"], transposed(refs[f"u_{name}"]))]
    )
    d_coupling = -(d_coupling * _gpu_sweeps.between(refs, name))
    self.store(f"coupling_{name}", d_coupling)
    self.store("dz", dz * _gpu_sweeps.from_start(refs, name, z.shape[1]))
    return by_rate, d_target, d_scores

  def pull(
    self, name: str, z: jax.Array, by_rate: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The adjoints of z and of targets, with that of a pass's directions."""
    dz, d_target = rows.write_direction_adjoint(
      *self.loss(z), self.row(f"rate_{name}") * by_rate
    )
    if self.spec.first_order:
      dz = jnp.zeros_like(dz)
    return dz, d_target


def backward(
  operands: dict[str, jax.Array], spec: types.Spec
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: as `forward` takes them but for `memory_` and `reset_`, and by
      tile what it saved of each pass, directions as `u_`, and `d_output`, in
      the dtype of values; memories `d_final_`, and with `last` `d_last_`.
    spec: the memory's meaning.

  Returns:
    By tile, in the dtype of values: `d_query`, `d_key`, `d_value`, `d_target`;
    of each pass float32 `d_gates_` `[tiles, batch, heads, adjoint_kinds *
    tile]` and `d_total_` `[tiles, batch, heads, width]` (memories times their
    adjoints after the tile, summed over slots), and memories `d_memory_`, with
    `resets` `d_reset_`, with `last` `d_start_`.
  """
  shape = operands["target"].shape
  num_tiles, batch, heads = shape[:3]
  dtype, wide_dtype = operands["value"].dtype, operands["d_final_key"].dtype
  part = jax.ShapeDtypeStruct(shape[3:], dtype)
  square = jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype)
  local = {"dz": part}
  results = {
    f"d_{name}": jax.ShapeDtypeStruct(operands[name].shape, dtype)
    for name in ("query", "key", "value", "target")
  }
  kinds = ["d_final", "d_memory"]
  if "resets" in operands:
    kinds.append("d_reset")
  if "last" in operands:
    kinds += ["d_last", "start", "d_start"]
  for name in NAMES:
    memory = operands[f"d_final_{name}"]
    width = memory.shape[-1]
    local[f"low_{width}"] = jax.ShapeDtypeStruct(memory.shape[2:], dtype)
    if "last" in operands:
      local[f"start_{width}"] = local[f"low_{width}"]
    local |= {f"reader_{name}": part, f"scores_{name}": square}
    local[f"u_{name}" if spec.stale else f"coupling_{name}"] = square
    gates_size = len(adjoint_kinds(spec)) * full_tiles.TOKENS
    results[f"d_gates_{name}"] = jax.ShapeDtypeStruct(
      (*shape[:3], gates_size), wide_dtype
    )
    results[f"d_total_{name}"] = jax.ShapeDtypeStruct(
      (num_tiles, batch, heads, width), wide_dtype
    )
    results |= {
      f"{kind}_{name}": jax.ShapeDtypeStruct(memory.shape, wide_dtype)
      for kind in kinds
      if kind in ("d_memory", "d_reset", "d_start")
    }
  names = [f"{kind}_{name}" for kind in kinds for name in NAMES]
  return tile_kernel.run(
    lambda refs, scalars, carry: _Tile(refs, scalars, spec).run(carry),
    "trellis_backward",
    operands,
    results,
    heads=heads,
    memories=names,
    carried=[(f"d_final_{name}", f"d_memory_{name}") for name in NAMES],
    local=local,
    # The value pass ends first, and what a pass wrote is not read later.
    in_place={f"d_{x}": x for x in ("query", "key", "value", "target")},
    zeroed=[x for x in names if x.startswith(("d_reset", "d_start"))],
    reverse=True,
  )
