"""The algebra of one tile of test-time training, as matrix products.

Rows are tokens. For each inner layer, X are the inputs and U the gradients that
the tile writes (`rows`), and W, b are the weights before the tile. eta are the
rates, mu and Omega those of `math.decay`. The weights after token t map rows R
to

  diag(mu) (R W + b) - (Omega * (R X^T + 1) diag(eta)) U

With step scales c, and W', b' the weights at the chunk's start, they map to

  diag(1 - c) (R W' + b') + diag(c) (the above)

The next layer reads GELU of the result. Then W <- mu_C W - X^T diag(eta
Omega_C) U, and at the end of a chunk W <- W' + c_C (W - W').
"""

import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.math import decay, solver
from memcomp_kernels.test_time_training import inner, reference, rows

_TILE_TIME = 16
"""Tokens per tile with gradients per token, where a call names no tiling."""


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory.

  With chunk-start gradients one tile is one chunk of the paper. With gradients
  per token the tile size is free and does not change the result.
  """
  spec, tiling = call.spec, call.tiling
  free = _TILE_TIME if tiling is None else tiling.tile_time
  constants = "norm_scale", "norm_bias"  # no token changes them
  return form_lib.Form(
    spec=spec,
    tile_time=spec.chunk_size if spec.chunked else free,
    run_tile=run,
    memories=("layers", *constants),
    starts=("starts", *constants) if spec.chunked else (),
  )


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, solver.Stats | None]:
  """Writes and reads one tile; see `Form.run_tile`.

  The memories are layers, norm scale and norm bias. The statistics are None if
  there is no system to solve.
  """
  inputs, spec = call.inputs, call.spec
  dtype = inputs.query.dtype
  product = functools.partial(contract.product, dtype=dtype)
  layers, norm_scale, norm_bias = call.memories
  start_layers, *_ = call.starts
  wide = norm_scale.dtype
  log_decay, rate = (
    gate[..., 0].astype(wide) for gate in (inputs.log_decay, inputs.write_rate)
  )
  scale = inputs.step_scale
  scale = None if scale is None else scale.astype(wide)
  norm = norm_scale[..., None, :], norm_bias[..., None, :]
  target = inputs.value.astype(wide) - inputs.key.astype(wide)
  labels = inner.Labels(
    target, *(jnp.broadcast_to(x, target.shape) for x in norm)
  )

  stats, eps = None, spec.norm_eps
  if spec.chunked:
    written = rows.at_start(product, start_layers, inputs.key, labels, eps)
  else:
    before = decay.decay_before(log_decay)
    arguments = inputs.key, labels, before, rate, eps
    if spec.model == "linear":
      written, stats = rows.per_token_linear(product, layers[0], *arguments)
    else:
      written = rows.per_token_mlp(product, layers, *arguments)

  factors = decay.decay_factors(log_decay)
  share = factors.between * rate[..., None, :]
  y = inputs.query
  for i, (layer, start, new) in enumerate(
    zip(layers, start_layers, written, strict=True)
  ):
    asked = jax.nn.gelu(y) if i else y
    y = factors.from_start[..., None] * rows.apply(product, layer, asked)
    scores = (product("bhri,bhsi->bhrs", asked, new.x) + 1) * share
    y = y - product("bhrs,bhso->bhro", scores, new.u)
    if scale is not None:
      at_start = rows.apply(product, start, asked)
      y = at_start + scale * (y - at_start)
  y = inputs.query.astype(wide) + inner.norm(y, *norm, eps)

  to_end = (factors.to_end * rate)[..., None]
  ends = []
  for layer, new in zip(layers, written, strict=True):
    u = to_end * new.u
    kept = factors.total[..., None]
    weight = kept[..., None] * layer.weight
    weight = weight - product("bhci,bhco->bhio", new.x, u)
    ends.append(reference.Layer(weight, kept * layer.bias - jnp.sum(u, axis=2)))
  layers = tuple(ends)
  if scale is not None:

    def move(end, start):
      share = scale[:, :, -1].reshape(rate.shape[:2] + (1,) * (end.ndim - 2))
      return start + share * (end - start)

    moved = jax.tree.map(move, layers, start_layers)
    layers = contract.batched_where(call.complete, moved, layers)
  return (layers, norm_scale, norm_bias), y.astype(dtype), stats
