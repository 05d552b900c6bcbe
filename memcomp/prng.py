"""PRNG keys of one generator, whatever JAX's default is."""

import jax


def key(seed: int | jax.Array) -> jax.Array:
  """Returns the key of a seed.

  It always uses Threefry, so draws depend on the seed and not on
  JAX_DEFAULT_PRNG_IMPL. A row also draws the same under `jax.vmap` as alone,
  which JAX's other generators (`rbg`, `unsafe_rbg`) do not promise.
  """
  return jax.random.key(seed, impl="threefry2x32")
