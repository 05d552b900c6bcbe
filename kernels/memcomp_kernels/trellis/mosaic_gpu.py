"""Trellis by Pallas GPU kernels, forward and backward.

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
from memcomp_kernels.primitives.mosaic_gpu import full_tiles, modes, rows
from memcomp_kernels.trellis import (
  _gpu_backward_kernel,
  _gpu_forward_kernel,
  tilings,
  types,
  xla_chunked,
)

_PLACES = ("key", 0), ("value", -1)
"""Passes, and which of an input's gates is theirs."""


def _operands(spec: types.Spec, inputs: types.Inputs) -> dict[str, jax.Array]:
  """What both kernels need of tiles `[tiles, batch, heads, tile, ...]`."""
  names = "query", "key", "value", "target"
  operands = {name: getattr(inputs, name) for name in names}
  log_decay = inputs.log_decay.astype(jnp.float32)
  if not spec.forget_gate:
    log_decay = jnp.zeros_like(log_decay)
  for name, place in _PLACES:
    log = jnp.cumsum(log_decay[..., place], axis=-1)
    factors = decay.decay_factors(log_decay[..., place])
    rate = inputs.write_rate[..., place].astype(jnp.float32)
    gates = jnp.concatenate([log, log, rate, factors.to_end], axis=-1)
    operands[f"gates_{name}"] = gates
    if not spec.stale:
      operands[f"before_{name}"] = log - log_decay[..., place]
    operands[f"total_{name}"] = factors.total
  return operands


def _prepare(form: form_lib.Form, layout: tiles.Layout, operands):
  """The inputs in full tiles, what both kernels read, and flags or None."""
  inputs, _, _ = tile_scan.lay(layout, operands)
  inputs = jax.tree.map(full_tiles.fill, inputs)
  batch, time = form_lib.sizes(operands.inputs)
  given = _operands(form.spec, inputs)
  if form.spec.stale:
    flags = full_tiles.flags(layout, batch, time)
    if flags is not None:
      given |= flags | _by_name("start", operands.chunk_start)
  else:
    flags = full_tiles.resets(layout)
    given |= flags or {}
  return inputs, given, flags


def _forward(form, layout, operands, save):
  """Of `form.Engine`."""
  _, given, flags = _prepare(form, layout, operands)
  given |= _by_name("memory", operands.memories)
  if flags is not None:
    given |= _by_name("reset", operands.reset)
  found = _gpu_forward_kernel.forward(given, form.spec, save)
  chunk_start = _both(found, "final")  # not read: a chunk ends with the call
  if not form.spec.stale:
    chunk_start = operands.chunk_start
  elif flags is not None:
    chunk_start = full_tiles.where_last(
      flags, _both(found, "last"), operands.chunk_start
    )
  result = form_lib.Result(
    _both(found, "final"),
    chunk_start,
    full_tiles.unlay(form, layout, operands, found["output"]),
    None,
  )
  if not save:
    return result, None
  names = [name for name in found if name.startswith("saved_")]
  return result, {name: found[name] for name in names}


def _backward(form, layout, operands, saved, cotangents):
  """Of `form.Engine`."""
  inputs, given, flags = _prepare(form, layout, operands)
  given |= {name.replace("saved_u", "u"): x for name, x in saved.items()}
  given |= _by_name("d_final", cotangents.memories)
  if "last" in given:
    given |= _by_name("d_last", cotangents.chunk_start)
  d_output = full_tiles.fill(tiles.lay(layout, cotangents.outputs))
  given["d_output"] = d_output.astype(inputs.value.dtype)
  found = _gpu_backward_kernel.backward(given, form.spec)

  d_log, d_rate = _gate_adjoints(form.spec, inputs, given, found)
  if not form.spec.forget_gate:
    d_log = jnp.zeros_like(d_log)
  if inputs.log_decay.shape[-1] == 1:
    d_log = jnp.sum(d_log, axis=-1, keepdims=True)
  if inputs.write_rate.shape[-1] == 1:
    d_rate = jnp.sum(d_rate, axis=-1, keepdims=True)
  d_inputs = types.Inputs(
    query=found["d_query"],
    key=found["d_key"],
    value=found["d_value"],
    target=found["d_target"],
    log_decay=d_log,
    write_rate=d_rate,
  )
  d_inputs = jax.tree.map(
    lambda d, x: full_tiles.unlay(form, layout, operands, d.astype(x.dtype)),
    d_inputs,
    inputs,
  )
  d_memories = _both(found, "d_memory")
  zeros = jax.tree.map(jnp.zeros_like, d_memories)
  d_reset = zeros if flags is None else _both(found, "d_reset")
  if not form.spec.stale:
    d_start = cotangents.chunk_start
  elif flags is None:
    d_start = zeros
  else:
    # A row without a chunk hands on the start that it was given.
    kept = full_tiles.where_last(flags, zeros, cotangents.chunk_start)
    d_start = jax.tree.map(jnp.add, _both(found, "d_start"), kept)
  return form_lib.Operands(d_memories, d_start, d_reset, d_inputs)


def _gate_adjoints(
  spec: types.Spec,
  inputs: types.Inputs,
  given: dict[str, jax.Array],
  found: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Of log decays and rates, `[tiles, batch, heads, tile, 2]`.

  Each term of a read holds exp(log) of its token, each with a direction
  exp(-log) of that token's, what reaches the tile's end exp(log) of the last;
  with gradients per token each term of z that of the token before.

  Args:
    spec: the memory's meaning.
    inputs: in tiles.
    given: what the kernel was given.
    found: what it found.
  """
  d_logs, d_rates = [], []
  for name, place in _PLACES:
    rate = inputs.write_rate[..., place].astype(jnp.float32)
    kinds = len(_gpu_backward_kernel.adjoint_kinds(spec))
    by_reads, d_rate, by_end, *before = jnp.split(
      found[f"d_gates_{name}"], kinds, axis=-1
    )
    kept = jnp.sum(found[f"d_total_{name}"], axis=-1)
    at_end = given[f"total_{name}"] * kept
    at_end -= jnp.sum(rate * by_end, axis=-1)
    d_log = (by_reads - rate * d_rate).at[..., -1].add(at_end)
    if before:
      by_z = jnp.roll(before.pop(), -1, axis=-1)  # nothing is before the first
      d_log = d_log + by_z.at[..., -1].set(0.0)
    d_logs.append(lax.cumsum(d_log, axis=3, reverse=True))
    d_rates.append(d_rate)
  return jnp.stack(d_logs, axis=-1), jnp.stack(d_rates, axis=-1)


def _both(found: dict[str, jax.Array], kind: str) -> form_lib.Memories:
  return found[f"{kind}_key"], found[f"{kind}_value"]


def _by_name(kind: str, memories: Any) -> dict[str, jax.Array]:
  key, value = memories
  return {f"{kind}_key": key, f"{kind}_value": value}


def _as_saved(form, operands):
  """Of `form.Engine`."""
  dtype = operands.inputs.query.dtype
  low = jax.tree.map(lambda x: x.astype(dtype), operands.memories)
  return _by_name("saved", low)


ENGINE = form_lib.Engine(_forward, _backward, _as_saved)


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
  tiling: tilings.Tiling | None = None,
) -> tuple[types.State, jax.Array]:
  """Equal to `reference`, by GPU kernels; see `api.chunk`.

  Raises:
    NotImplementedError: the kernels do not do it; says why.
  """
  if reason := unsupported(inputs, spec):
    raise NotImplementedError(f"trellis mosaic_gpu: {reason}")
  tiling = tiling or tilings.Tiling()
  if not spec.stale:
    tiling = dataclasses.replace(tiling, tile_time=full_tiles.TOKENS)
  form = xla_chunked.form(spec, tiling)
  form = dataclasses.replace(form, engine=ENGINE)
  return chunked.chunk(
    form, state, inputs, segment_ids=segment_ids, reset_state=reset_state
  )


def unsupported(inputs: types.Inputs, spec: types.Spec) -> str | None:
  """Why the kernels cannot do a call here, or None."""
  if reason := modes.unavailable():
    return reason
  if spec.value_readout_phi:
    return "no kernel for value_readout_phi=True"
  if inputs.log_phi_eps is not None:
    return "no kernel for an eps of each token (log_phi_eps)"
  for name in (spec.phi, spec.read_activation):
    if name not in rows.NAMES:
      return f"no kernel for {name}"
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  allowed = _gpu_forward_kernel
  return full_tiles.too_large(
    spec.chunk_size if spec.stale else 1,
    {
      "key_dim": (inputs.query.shape[-1], allowed.DIMS),
      "value_dim": (inputs.value.shape[-1], allowed.DIMS),
      "num_slots": (spec.num_slots, allowed.SLOTS),
    },
  )
