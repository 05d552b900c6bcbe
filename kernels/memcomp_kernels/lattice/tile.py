"""Lattice in chunk form, as matrix products in plain JAX.

`chunking.chunked` scans over tiles. With chunk-start gradients one tile is one
chunk. With gradients per token the tile size is free and does not change the
result (`per_token/tile.py`). Only gradients per token with sparsity have no
chunk form, because every token moves every entry by a threshold. Tokens are
then scanned one by one. The scan is checkpointed, so that its gradient stores
few memories.

In the algebra of one chunk rows are tokens. Phi and |s'| belong to the chunk's
start. S is the memory before the tile, which is the chunk's start unless the
chunk began in an earlier call:

  H, C     the loss factors h and c of all tokens, by products with Phi
  P = H Phi                     [time, slots], the tangent's share
  a = -gamma C / |s'|           so that ds_i = a_i (h - Phi_i p_i)
  beta = (mu^2 + a^2 |h - Phi p|^2)^(-1/2)   ("normalized", else 1)

Then S_r = (S_{r-1} mu_r + h_r a_r^T - Phi diag(a_r p_r)) diag(beta_r) is linear
with a decay beta mu per slot. With G the running sum of its log and w = beta a,

  b_r = sum_{i<=r} exp(G_r - G_i) w_i p_i
  Y   = (Q e^G) S^T + A H - (Q b) Phi^T,   A_{r,i} = sum_m Q w_i exp(G_r - G_i)
  S  <- S diag(e^{G_C}) + H^T (w e^{G_C - G}) - Phi diag(b_C)

`channel_decay` computes the scores A. A complete chunk is thresholded and
renormalised.
"""

import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.lattice import reference, tilings
from memcomp_kernels.lattice.per_token import tile as tile_lib
from memcomp_kernels.math import channel_decay

_SCAN_BLOCK = 32  # tokens between two saved states of a scan


def chunk(call: dispatch.Call) -> tuple:
  """Computes what `reference` does, in chunk form; see `Op.chunk`."""
  if not call.spec.chunked and call.spec.sparsity:
    return contract.scan(reference.step, call, block=_SCAN_BLOCK)
  return _chunk(call)


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory, for calls that do not scan tokens."""
  spec, tiling = call.spec, call.tiling or tilings.DEFAULT
  if spec.chunked:
    summed = spec.sums_rates
    return form_lib.Form(
      spec=spec,
      tile_time=spec.chunk_size,
      run_tile=run,
      memories=("memory", "write_rate_sum") if summed else ("memory",),
      # At a chunk's start the sum is zero, so no tile reads it.
      starts=("memory_start", None) if summed else ("memory_start",),
    )
  return form_lib.Form(
    spec=spec,
    tiling=tiling,
    tile_time=tiling.tile_time,
    run_tile=tile_lib.run,
    memories=("memory",),
  )


_chunk = chunked.implementation(form)


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Writes and reads one tile, at most one chunk; see `Form.run_tile`.

  The memories are (S,); with sparsity (S, sum of write rates).
  """
  memories, starts, inputs, _, spec, _ = call
  dtype, time = inputs.query.dtype, inputs.query.shape[-2]
  product = functools.partial(contract.product, dtype=dtype)
  S, start = memories[0], starts[0]
  block = min(time, tilings.BLOCK_TIME)
  inputs = _pad(inputs, block)
  query, key, value, log_decay, rate = (x.astype(S.dtype) for x in inputs)

  Phi, norms = reference.directions(start, spec)
  if spec.objective == "decoding":
    h, c = product("bhdm,bhtm->bhtd", Phi, key) - value, key
  elif spec.objective == "encoding":
    h, c = value, product("bhdm,bhtd->bhtm", Phi, value) - key
  else:
    h, c = -value, key
  writes = -rate * c / norms
  # The component of h along each column; "delta" does not subtract it.
  projected = spec.update != "delta"
  share = product("bhdm,bhtd->bhtm", Phi, h) if projected else jnp.zeros(())
  log_decay = jnp.broadcast_to(log_decay, writes.shape)
  if spec.unit_columns:
    # This is |h - Phi p|^2. Columns have norm 1 here. The factor `off` makes
    # derivatives off the unit sphere equal those of the definition. Rounding
    # could make the square negative, so it is clipped at zero.
    off = 2 - reference.squared_norms(Phi)
    tangent = jnp.sum(h * h, axis=-1, keepdims=True) - off * share * share
    squares = writes * writes * jnp.maximum(tangent, 0)
    beta = reference.contraction(jnp.exp(log_decay), squares)
    log_decay, writes = log_decay + jnp.log(beta), beta * writes

  factors = channel_decay.channel_decay(log_decay, block)
  output = product("bhdm,bhtm->bhtd", S, factors.from_start * query)
  output = output + channel_decay.read(factors, query, writes, h, dtype)
  S = factors.total[..., None, :] * S
  S = S + product("bhtd,bhtm->bhdm", h, factors.to_end * writes)
  if projected:
    along = channel_decay.running_sum(factors, writes * share)
    output = output - product("bhdm,bhtm->bhtd", Phi, along * query)
    S = S - Phi * along[..., -1:, :]

  rates = (
    memories[1] + jnp.sum(rate, axis=(-2, -1)) if spec.sums_rates else None
  )
  finished = reference.finish(S, start, rates, spec)
  S = contract.batched_where(call.complete, finished, S)
  output = output[..., :time, :].astype(dtype)
  if rates is None:
    return (S,), output, None
  rates = contract.batched_where(call.complete, jnp.zeros_like(rates), rates)
  return (S, rates), output, None


def _pad(inputs: reference.Inputs, block: int) -> reference.Inputs:
  """Pads with zeros, which change nothing, to a whole number of blocks."""

  def pad(x):
    missing = -x.shape[-2] % block
    return jnp.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)])

  return reference.Inputs(*map(pad, inputs))
