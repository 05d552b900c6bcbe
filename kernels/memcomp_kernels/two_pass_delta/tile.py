"""The algebra of one tile of the two-pass delta rule, as matrix products.

Rows are tokens. For one pass, X are its inputs, T its targets, d its decays,
theta its rates, and S its memory before the tile. E = T - X S' are the errors
at the memory S' before each token. With mu and Omega of d (`math.decay`),

  (I + strict(Omega_{t-1,i} * X X^T) diag(theta)) E = T - diag(mu_{t-1}) X S

is unit triangular (`math.delta`). With U = diag(theta) E, rows R read, and the
tile leaves the memory,

  diag(mu) R S + (Omega * (R X^T)) U,      mu_C S + X^T diag(Omega_C) U

The inputs X of the second pass are codes. They are computed from what the first
pass reads with its own X at every token, which costs one more read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.math import decay, delta
from memcomp_kernels.two_pass_delta import reference

# Lower bound of a decay, because its log is summed. A smaller share is as good
# as zero.
_SMALLEST = 1e-30


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory."""
  tiling = call.tiling or form_lib.Tiling(tile_time=32)
  return form_lib.Form(
    spec=call.spec,
    tile_time=min(tiling.tile_time, call.inputs.query.shape[1]),
    run_tile=run,
    memories=("key_memory", "value_memory"),
  )


class Pass(NamedTuple):
  """One pass over a tile.

  Attributes:
    memory: memory before the tile, `[batch, heads, in, out]`.
    key: its inputs, `[batch, heads, tile, in]`.
    written: U, `[batch, heads, tile, out]`.
    factors: its decay factors after each token's write.
    before: its decay factors before each token's write.
  """

  memory: jax.Array
  key: jax.Array
  written: jax.Array
  factors: decay.Decay
  before: decay.DecayBefore

  def read(self, query: jax.Array, *, first: bool = False) -> jax.Array:
    """Reads the memory after each token's write, or before it if `first`."""
    factors = self.before if first else self.factors
    dtype = self.key.dtype
    scores = contract.product("bhti,bhsi->bhts", query, self.key, dtype)
    scores *= factors.between
    carried = contract.product("bhti,bhio->bhto", query, self.memory, dtype)
    return factors.from_start[..., None] * carried + contract.product(
      "bhts,bhso->bhto", scores, self.written, dtype
    )

  def end(self) -> jax.Array:
    """Returns the memory after the tile."""
    kept = self.factors.to_end[..., None] * self.written
    new = contract.product("bhti,bhto->bhio", self.key, kept, self.key.dtype)
    return self.factors.total[..., None, None] * self.memory + new


def solve(
  memory: jax.Array,
  of_tokens: reference.Gates,
  key: jax.Array,
  target: jax.Array,
) -> Pass:
  """Solves for what a pass writes.

  Args:
    memory: memory before the tile, `[batch, heads, in, out]`.
    of_tokens: decays and rates, each `[batch, heads, tile, 1]`.
    key: `[batch, heads, tile, in]`, in the dtype of products.
    target: `[batch, heads, tile, out]`.
  """
  kept, rate = of_tokens
  log_decay = jnp.log(jnp.maximum(kept[..., 0], _SMALLEST))
  factors = decay.decay_factors(log_decay)
  before = decay.decay_before(log_decay)
  coupling = contract.product("bhti,bhsi->bhts", key, key, key.dtype)
  coupling *= before.between * jnp.swapaxes(rate, -1, -2)
  predicted = contract.product("bhti,bhio->bhto", key, memory, key.dtype)
  predicted *= before.from_start[..., None]
  error = delta.solve(coupling, target.astype(memory.dtype) - predicted)
  return Pass(memory, key, rate * error, factors, before)


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Writes and reads one tile; see `Form.run_tile`.

  The memories are S_K and S_V.
  """
  inputs, spec = call.inputs, call.spec
  S_K, S_V = call.memories
  dtype, first = inputs.query.dtype, spec.read_first
  of_first, of_second = reference.gates_of_passes(inputs, spec, S_K.dtype)

  def code(z):
    return reference.nsilu(z, spec.code_eps).astype(dtype)

  keys = solve(S_K, of_first, inputs.source, inputs.key)
  codes = code(keys.read(inputs.source))
  values = solve(S_V, of_second, codes, inputs.value)
  asked = code(keys.read(inputs.query, first=first))
  y = values.read(asked, first=first)
  return (keys.end(), values.end()), y.astype(dtype), None
