"""Keys of random draws, of one generator whatever JAX's default is."""

import jax


def key(seed: int | jax.Array) -> jax.Array:
  """Returns the key of a seed.

  Threefry, by name: what a row draws under `jax.vmap` is what it draws alone,
  which JAX's other generators (`rbg`, `unsafe_rbg`) do not promise. So a run's
  and a sample's draws depend on the seed and not on the user's
  JAX_DEFAULT_PRNG_IMPL.
  """
  return jax.random.key(seed, impl="threefry2x32")
