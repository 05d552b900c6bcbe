"""The algebra of one tile of Trellis, as matrix products.

Rows are tokens, W are the written keys or values, and g the write rates. M is
the memory at the tile's start. `math.decay` defines mu and Omega:

  U       the write directions. With chunk-start gradients they follow directly
          from Z = W M^T; with gradients per token they solve a system
  pass 1  R = diag(mu) Q M_K^T - (Omega * (Q K^T) diag(g)) U_K,   F = f(R)
  pass 2  Y = diag(mu) F M_V   - (Omega * (F U_V^T) diag(g)) V
  next    M <- mu_C M - (U * g * Omega_C)^T W

With gradients per token, z_t = M_{t-1} w_t unrolls to

  z_t = mu_{t-1} M w_t - sum_{i<t} g_i Omega_{t-1,i} (w_i . w_t) u_i

in which only u is unknown. `math.solver` solves this system.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.math import activations, decay, solver
from memcomp_kernels.trellis import tilings


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form that the chunk form runs.

  With chunk-start gradients one tile is one chunk of the paper. With gradients
  per token the tile size is free and does not change the result.
  """
  spec, tiling = call.spec, call.tiling or tilings.DEFAULT
  starts = ("key_memory_start", "value_memory_start") if spec.chunked else ()
  return form_lib.Form(
    spec=spec,
    tiling=tiling,
    tile_time=tilings.tile_time(spec, tiling),
    run_tile=run,
    memories=("key_memory", "value_memory"),
    starts=starts,
  )


def bounded(call: dispatch.Call) -> dispatch.Call:
  """Bounds log decays for kernels that sum those of a tile in one float32.

  At -30 a memory keeps 1e-13 of its content. That is far below float32's
  precision next to anything written later. A sum of 64 such log decays still
  leaves later decays an error of at most 6e-5.
  """
  log_decay = jnp.maximum(call.inputs.log_decay, -30.0)
  return call._replace(inputs=call.inputs._replace(log_decay=log_decay))


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, solver.Stats | None]:
  """Writes and reads one tile; see `Form.run_tile`.

  The memories are (M_K, M_V). The statistics are of both passes' solves, None
  with chunk-start gradients. The tiling says how the system of gradients per
  token is solved.
  """
  memories, starts, inputs, spec = *call[:3], call.spec
  dtype = inputs.query.dtype
  product = functools.partial(contract.product, dtype=dtype)
  wide = memories[0].dtype
  log_decay = jnp.moveaxis(inputs.log_decay.astype(wide), -1, 0)
  rate = jnp.moveaxis(inputs.write_rate.astype(wide), -1, 0)
  factors = decay.decay_factors(log_decay)
  weights = factors.between * rate[..., None, :]
  to_end = factors.to_end * rate

  def system(start, written, gate):
    """Returns Z and the coupling of its rows, which determine U."""
    z = product("bhmd,bhcd->bhcm", start, written)
    if spec.chunked:
      return z, None
    before = decay.decay_before(log_decay[gate])
    coupling = product("bhtd,bhid->bhti", written, written)
    coupling = coupling * before.between * rate[gate][..., None, :]
    return before.from_start[..., None] * z, coupling

  def advance(memory, u, written, gate):
    kept = factors.total[gate][..., None, None] * memory
    u = u * to_end[gate][..., None]
    return kept - product("bhcm,bhcd->bhmd", u, written)

  key_memory, value_memory = memories
  # The write directions of the two passes are independent, so both passes share
  # one system.
  z, coupling = jax.tree.map(
    lambda *passes: jnp.stack(passes),
    system(starts[0], inputs.key, 0),
    system(starts[1], inputs.value, -1),
  )
  parameters = jax.tree.map(
    lambda x: jnp.broadcast_to(x.astype(wide), (2, *x.shape)),
    (inputs.target, inputs.log_phi_eps),
  )
  direction, stats = functools.partial(_direction, spec), None
  if spec.chunked:
    u = direction(z, parameters)
  else:
    u, stats = solver.solve(
      direction, z, coupling, parameters, call.tiling.solver
    )
    stats = solver.total(stats)
  u_key, u_value = u

  scores = product("bhrd,bhid->bhri", inputs.query, inputs.key) * weights[0]
  read = product("bhmd,bhcd->bhcm", key_memory, inputs.query)
  read = factors.from_start[0][..., None] * read
  read = read - product("bhri,bhim->bhrm", scores, u_key)
  code = activations.activate(spec.read_activation, read, spec.read_eps)

  scores = product("bhrm,bhim->bhri", code, u_value) * weights[-1]
  output = product("bhcm,bhmd->bhcd", code, value_memory)
  output = factors.from_start[-1][..., None] * output
  output = output - product("bhri,bhid->bhrd", scores, inputs.value)
  if spec.value_readout_phi:
    _, log_eps = jax.tree.map(lambda x: x[1], parameters)
    output = activations.activate(spec.phi, output, spec.eps(log_eps))

  memories = (
    advance(key_memory, u_key, inputs.key, 0),
    advance(value_memory, u_value, inputs.value, -1),
  )
  return memories, output.astype(dtype), stats


def _direction(spec, z, parameters):
  """Returns the gradient J_phi(z)^T (phi(z) - target)."""
  target, log_eps = parameters
  if spec.first_order:
    z = lax.stop_gradient(z)
  return activations.write_direction(spec.phi, z, target, spec.eps(log_eps))
