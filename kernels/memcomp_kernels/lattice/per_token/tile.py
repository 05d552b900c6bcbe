"""One tile of Lattice with exact gradients per token, as matrix products.

A solver (`substitution` or `sweeps`) finds the few numbers that determine what
tokens write. Given those, reads and the next memory are matrix products with
the memory S_0 before the tile:

  Y = (A * Q) S_0^T + scores H,     S = S_0 diag(A_C) + H^T W_C
"""

import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.lattice import reference
from memcomp_kernels.lattice.per_token import substitution, sweeps, writes
from memcomp_kernels.math import solver


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, solver.Stats]:
  """Writes and reads one tile; see `Form.run_tile`.

  The memory is S.
  """
  inputs, spec, tiling = call.inputs, call.spec, call.tiling
  dtype, (S,) = inputs.query.dtype, call.memories
  product = functools.partial(contract.product, dtype=dtype)
  query, key, value, log_decay, rate = (x.astype(S.dtype) for x in inputs)
  taken = call.valid[:, None, :, None].astype(S.dtype)
  taken = jnp.broadcast_to(taken, rate.shape)
  tokens = writes.TokenInputs(
    query, key, value, jnp.exp(log_decay), rate, taken
  )
  if tiling.solver == "sweeps":
    solution, stats = sweeps.solve(spec, tiling, S, tokens)
  else:
    solution = substitution.solve(spec, S, tokens)
    stats = solver.no_stats(S.shape[:2])
    stats = stats._replace(blocks=stats.blocks + 1)

  output = product("bhdm,bhtm->bhtd", S, solution.from_start)
  output = output + product("bhtj,bhjd->bhtd", solution.scores, solution.h)
  S = solution.keep[..., None, :] * S
  S = S + product("bhjd,bhjm->bhdm", solution.h, solution.write)
  if spec.unit_columns:
    # Rounding moves columns off the sphere, so they are normalised here.
    untouched = solution.after.untouched[..., None, :] > 0
    S = jnp.where(untouched, S, reference.normalize(S, S))
  return (S,), output.astype(dtype), stats
