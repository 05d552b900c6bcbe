"""Rotary position embedding (arXiv 2104.09864), in interleaved pairs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FREQUENCIES = ("standard", "inclusive")


def fill(
  config: Any, found: dict[str, Any], share: float = 1.0
) -> dict[str, int]:
  """The `rotary_dim` of a config, if None: a share of the key's channels.

  Args:
    config: has `rotary_dim` and `key_dim`.
    found: sizes that are already filled in.
    share: share of the key's channels.
  """
  if config.rotary_dim is not None:
    return {}
  key_dim = found.get("key_dim", config.key_dim)
  return {"rotary_dim": int(key_dim * share) // 2 * 2}


def check(config: Any) -> None:
  """Checks the `rotary_dim` of a config against its `key_dim`.

  Raises:
    ValueError: it is odd, negative or larger than `key_dim`.
  """
  dim, key_dim = config.rotary_dim, config.key_dim
  if dim is None:
    return
  if dim % 2 or dim < 0 or (key_dim and dim > key_dim):
    raise ValueError(
      f"rotary_dim={dim} must be even and in [0, key_dim={key_dim}]"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
  """Rotates the first channels by angles proportional to the position.

  Attributes:
    dim: r, number of rotated channels, even; 0 for none.
    base: b, base of the frequencies.
    frequencies: "standard" b^(-2j/r), or "inclusive" b^(-j/(r/2-1)), whose
      slowest is exactly 1/b; j = 0 .. r/2-1.
    scale: s = length / trained length, >= 1. The base becomes b * s^(r/(r-2)),
      with "inclusive" b * s, which slows the slowest frequency by s (NTK).
    reversed: whether to rotate by minus the angle. Weights need the direction
      that they were trained with.
  """

  dim: int
  base: float = 10_000.0
  frequencies: str = "standard"
  scale: float = 1.0
  reversed: bool = False

  def _frequencies(self) -> np.ndarray:
    pairs = self.dim // 2
    slowest = max(pairs - 1, 1)
    steps = pairs if self.frequencies == "standard" else slowest
    base = self.base * self.scale ** (steps / slowest)
    return base ** (-np.arange(pairs) / steps)

  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates `[batch, time, heads, dim]` by `positions` `[batch, time]`."""
    if not self.dim:
      return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = jnp.asarray(self._frequencies(), wide)
    angle = positions.astype(wide)[..., None, None] * frequencies
    angle = jnp.repeat(angle, 2, axis=-1)
    turned, rest = x[..., : self.dim].astype(wide), x[..., self.dim :]
    if self.reversed:
      angle = -angle
    # Rolls give the pairs' neighbours: `[..., 2]` arrays do not fit TPU tiles,
    # and the v5p compiler fails on some.
    is_first = jnp.arange(self.dim) % 2 == 0
    other = jnp.where(
      is_first, -jnp.roll(turned, -1, axis=-1), jnp.roll(turned, 1, axis=-1)
    )
    turned = turned * jnp.cos(angle) + other * jnp.sin(angle)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1)
