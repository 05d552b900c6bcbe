"""What a tile writes: for each inner layer, its inputs X and gradients U.

Token i's write to a layer is the outer product -eta_i x_i u_i, and -eta_i u_i
to its bias. So X and U describe all writes of a tile. With chunk-start
gradients, matrix products compute them from the weights at the chunk's start.
With gradients per token, the weights before token t map an input x_t to

  mu_{t-1} (x_t W + b) - sum_{i<t} eta_i Omega_{t-1,i} (x_i . x_t + 1) u_i

with W, b those before the tile. In "linear" the inputs are keys, so this is the
system of `math.solver`. In "mlp" the inputs of the second layer are unknown as
well, and they appear in the coupling. Tokens are therefore computed one by one,
from the rows of earlier tokens.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.math import decay, solver
from memcomp_kernels.test_time_training import inner, reference

Product = Callable[[str, jax.Array, jax.Array], jax.Array]


class LayerWrites(NamedTuple):
  """Writes of a tile to one layer.

  Attributes:
    x: the layer's inputs, `[batch, heads, tile, in]`.
    u: gradients at the layer's outputs, `[batch, heads, tile, out]`.
  """

  x: jax.Array
  u: jax.Array


def apply(product: Product, layer: reference.Layer, x: jax.Array) -> jax.Array:
  """Returns x W + b, `[batch, heads, tile, out]`."""
  y = product("bhci,bhio->bhco", x, layer.weight)
  return y + layer.bias[..., None, :]


def at_start(
  product: Product,
  starts: reference.Layers,
  key: jax.Array,
  labels: inner.Labels,
  eps: float,
) -> tuple[LayerWrites, ...]:
  """Returns all gradients at the weights `starts`."""
  z = apply(product, starts[0], key)
  if len(starts) == 1:
    return (LayerWrites(key, inner.gradient(eps, z, labels)),)
  hidden, slope = inner.gelu(z)
  u = inner.gradient(eps, apply(product, starts[1], hidden), labels)
  back = product("bhco,bhio->bhci", u, starts[1].weight)
  return LayerWrites(key, slope * back), LayerWrites(hidden, u)


def per_token_linear(
  product: Product,
  layer: reference.Layer,
  key: jax.Array,
  labels: inner.Labels,
  before: decay.DecayBefore,
  rate: jax.Array,
  eps: float,
) -> tuple[tuple[LayerWrites], solver.Stats]:
  """Returns the gradients at the weights before each token, for one layer."""
  base = before.from_start[..., None] * apply(product, layer, key)
  coupling = product("bhti,bhsi->bhts", key, key) + 1
  coupling = coupling * before.between * rate[..., None, :]
  direction = functools.partial(inner.gradient, eps)
  u, stats = solver.solve(
    direction, base, coupling, labels, solver.SUBSTITUTION
  )
  return (LayerWrites(key, u),), stats


def per_token_mlp(
  product: Product,
  layers: reference.Layers,
  key: jax.Array,
  labels: inner.Labels,
  before: decay.DecayBefore,
  rate: jax.Array,
  eps: float,
) -> tuple[LayerWrites, LayerWrites]:
  """Returns the gradients at the weights before each token, for two layers.

  This is a substitution. Each token reads the rows of earlier tokens, and never
  the weights that they changed.
  """
  first, second = layers
  base = before.from_start[..., None] * apply(product, first, key)
  share = before.between * rate[..., None, :]  # 0 on and above the diagonal
  coupling = (product("bhti,bhsi->bhts", key, key) + 1) * share

  def weigh(weights, rows):
    return product("bhs,bhso->bho", weights, rows)

  def body(done, token):
    t, base, coupling, share, mu, labels = token
    hidden_rows, u_first, u_second = done
    hidden, slope = inner.gelu(base - weigh(coupling, u_first))

    z = product("bhi,bhio->bho", hidden, second.weight) + second.bias
    alike = product("bhsi,bhi->bhs", hidden_rows, hidden) + 1
    u = inner.gradient(
      eps, mu[..., None] * z - weigh(share * alike, u_second), labels
    )

    back = mu[..., None] * product("bho,bhio->bhi", u, second.weight)
    alike = product("bhso,bho->bhs", u_second, u)
    back = back - weigh(share * alike, hidden_rows)
    new = hidden, slope * back, u
    done = tuple(
      lax.dynamic_update_index_in_dim(rows, row, t, 2)
      for rows, row in zip(done, new, strict=True)
    )
    return done, None

  by_token = jax.tree.map(
    lambda x: jnp.moveaxis(x, 2, 0),
    (base, coupling, share, before.from_start, labels),
  )
  empty = jnp.zeros_like
  done = empty(base), empty(base), empty(labels.target)
  time = jnp.arange(key.shape[2])
  (hidden, u_first, u_second), _ = lax.scan(body, done, (time, *by_token))
  return LayerWrites(key, u_first), LayerWrites(hidden, u_second)
