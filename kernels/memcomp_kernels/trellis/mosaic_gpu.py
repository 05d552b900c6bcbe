"""Trellis by a Pallas GPU kernel, forward; backward is the XLA form's.

Chunks are laid into tiles by XLA and filled up to 64 tokens with places that
change nothing. The memories before each chunk are what backward starts from.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.primitives import chunked, decay, tile_scan, tiles
from memcomp_kernels.primitives import form as form_lib
from memcomp_kernels.primitives.mosaic_gpu import modes, rows
from memcomp_kernels.trellis import _gpu_kernel, tilings, types, xla_chunked


def _pad(x: jax.Array) -> jax.Array:
  """Fills tiles `[tiles, batch, heads, tile, ...]` up."""
  missing = _gpu_kernel.TOKENS - x.shape[3]
  if not missing:
    return x
  return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * (x.ndim - 4))


def _operands(spec: types.Spec, inputs: types.Inputs) -> dict[str, jax.Array]:
  """What the kernel needs of tiles `[tiles, batch, heads, tile, ...]`."""
  inputs = jax.tree.map(_pad, inputs)
  operands = {
    name: getattr(inputs, name) for name in ("query", "key", "value", "target")
  }
  log_decay = inputs.log_decay.astype(jnp.float32)
  if not spec.forget_gate:
    log_decay = jnp.zeros_like(log_decay)
  rate = inputs.write_rate.astype(jnp.float32)
  for gate, place in (("0", 0), ("1", -1)):
    log, own = log_decay[..., place], rate[..., place]
    factors = decay.decay_factors(log)
    total = jnp.cumsum(log, axis=-1)
    operands |= {
      f"log{gate}": total,
      f"since{gate}": total,
      f"rate{gate}": own,
      f"from_start{gate}": factors.from_start,
      f"to_end{gate}": factors.to_end * own,
      f"total{gate}": factors.total,
    }
  return operands


def _flags(layout: tiles.Layout, num_tiles: int, batch: int, whole: bool):
  """Int32 `[tiles, batch]` by name, or None where no chunk is special."""
  if layout.flags is None:
    if whole:
      return None
    last = jnp.arange(num_tiles)[:, None] == num_tiles - 1
    resets = continues = jnp.zeros((num_tiles, batch), bool)
    last = jnp.broadcast_to(last, resets.shape)
  else:
    resets, continues, occupied = layout.flags
    continues &= occupied
    # Tiles are occupied up to the last token, but the first may be empty.
    following = jnp.concatenate(
      [occupied[1:], jnp.zeros_like(occupied[:1])], axis=0
    )
    later = lax.cummax(following.astype(jnp.int32), reverse=True) > 0
    last = occupied & ~later
  found = {"resets": resets, "continues": continues, "last": last}
  return {name: x.astype(jnp.int32) for name, x in found.items()}


def _forward(form, layout, operands, save):
  """Of `form.Engine`."""
  del save
  inputs, _, _ = tile_scan.lay(layout, operands)
  batch, time = form_lib.sizes(operands.inputs)
  num_tiles = inputs.query.shape[0]
  flags = _flags(layout, num_tiles, batch, time % form.tile_time == 0)
  given = _operands(form.spec, inputs) | _by_name("memory", operands.memories)
  if flags is not None:
    given |= flags
    given |= _by_name("reset", operands.reset)
    given |= _by_name("start", operands.chunk_start)
  found = _gpu_kernel.forward(given, form.spec)
  output = found["output"][:, :, :, : inputs.query.shape[3]]

  def both(kind):
    return found[f"{kind}_key"], found[f"{kind}_value"]

  chunk_start = both("final")  # not read: a chunk ends with the call
  if flags is not None:
    has = jnp.any(flags["last"] > 0, axis=0)
    chunk_start = contract.batched_where(
      has, both("last"), operands.chunk_start
    )
  result = form_lib.Result(
    both("final"), chunk_start, tiles.unlay(layout, output, time), None
  )
  return result, both("saved")


def _by_name(kind: str, memories: Any) -> dict[str, jax.Array]:
  key, value = memories
  return {f"{kind}_key": key, f"{kind}_value": value}


ENGINE = form_lib.Engine(
  _forward, tile_scan.backward, lambda form, operands: operands.memories
)


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
  tiling: tilings.Tiling | None = None,
) -> tuple[types.State, jax.Array]:
  """Equal to `reference`, by a GPU kernel; see `api.chunk`.

  Raises:
    NotImplementedError: the kernel does not do it; says why.
  """
  if reason := unsupported(inputs, spec):
    raise NotImplementedError(f"trellis mosaic_gpu: {reason}")
  form = xla_chunked.form(spec, tiling or tilings.Tiling())
  form = dataclasses.replace(form, engine=ENGINE)
  return chunked.chunk(
    form, state, inputs, segment_ids=segment_ids, reset_state=reset_state
  )


def unsupported(inputs: types.Inputs, spec: types.Spec) -> str | None:
  """Why the kernel cannot do a call here, or None."""
  if reason := modes.unavailable():
    return reason
  if not spec.stale:
    return "no kernel for gradients per token"
  if spec.value_readout_phi:
    return "no kernel for value_readout_phi=True"
  if inputs.log_phi_eps is not None:
    return "no kernel for an eps of each token (log_phi_eps)"
  for name in (spec.phi, spec.read_activation):
    if name not in rows.NAMES:
      return f"no kernel for {name}"
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  if spec.chunk_size > _gpu_kernel.TOKENS:
    return f"chunk_size={spec.chunk_size} is more than {_gpu_kernel.TOKENS}"
  widths = {
    "key_dim": inputs.query.shape[-1],
    "value_dim": inputs.value.shape[-1],
    "num_slots": spec.num_slots,
  }
  for name, width in widths.items():
    if width not in _gpu_kernel.WIDTHS:
      return f"{name}={width} is none of {_gpu_kernel.WIDTHS}"
  return None
