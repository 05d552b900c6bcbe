"""One tile of the delta rule on matrix units: the algebra, no layout.

Rows are tokens, S is the memory before the tile, E the rows of errors v - k S'
with S' the decayed memory that each token meets. With mu and Omega of
`primitives.decay`,

  (I + strict(Omega * K K^T) diag(beta)) E = V - diag(mu) K S
  U = diag(beta) E

and U is what the tile writes and reads as `primitives.outer` has it.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.delta_rule import types
from memcomp_kernels.primitives import chunked, decay, delta, matmul, outer


def run(
  memories: chunked.Memories,
  starts: chunked.Memories,
  inputs: types.Inputs,
  complete: jax.Array,
  spec: types.Spec,
  tiling: None,
) -> tuple[chunked.Memories, jax.Array, None]:
  """Writes and reads one tile.

  Args:
    memories: S before the tile, `[batch, heads, key, value]`.
    starts: not read: nothing is defined by chunk.
    inputs: `[batch, heads, tile, ...]`.
    complete: not read.
    spec: the memory's meaning.
    tiling: None: all of the tiling is the tile's size.

  Returns:
    The memory after the tile, o `[batch, heads, tile, value]`, and None.
  """
  del starts, complete, tiling
  (memory,) = memories
  query, key = inputs.query, inputs.key
  dtype = query.dtype
  value, log_decay, rate = (
    x.astype(memory.dtype)
    for x in (inputs.value, inputs.log_decay[..., 0], inputs.write_rate)
  )
  if not spec.forget_gate:
    log_decay = jnp.zeros_like(log_decay)
  factors = decay.decay_factors(log_decay)

  # The solve reads below the diagonal only, where what t meets is Omega_t.
  coupling = matmul.product("bhtk,bhik->bhti", key, key, dtype)
  coupling *= factors.between * jnp.swapaxes(rate, -1, -2)
  predicted = matmul.product("bhtk,bhkv->bhtv", key, memory, dtype)
  predicted *= factors.from_start[..., None]
  written = rate * delta.solve(coupling, value - predicted)

  output = outer.read(memory, query, key, written, factors)
  output *= spec.read_scale(key.shape[-1])
  memory = outer.write(memory, key, written, factors, dtype)
  return (memory,), output.astype(dtype), None
