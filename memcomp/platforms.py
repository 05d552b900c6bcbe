"""The cores, the numerical libraries, and why JAX has no device to run on."""

import os
import platform
import sys

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the numerical libraries."""
  from importlib import metadata  # takes long

  own = {"python": platform.python_version()}
  return own | {name: metadata.version(name) for name in _PACKAGES}


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def reason(error: BaseException) -> str | None:
  """Returns cause and fix if JAX could not start, else None."""
  text = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0]
  if "Unable to initialize backend" not in text:
    if not isinstance(error, AssertionError) or _has_devices():
      return None
    # JAX skips platforms without a plugin, until none is left.
    text = "its plugin is not installed"
  asked = os.environ.get("JAX_PLATFORMS")
  what = f"JAX_PLATFORMS={asked}: " if asked else ""
  return (
    f"{what}JAX has no such device ({text.rstrip('.')}); unset JAX_PLATFORMS to"
    " take what is there, or install what it names: the extra cuda13 or tpu"
  )


def _has_devices() -> bool:
  """Whether JAX has devices; True if it has not been imported."""
  if "jax" not in sys.modules:
    return True
  import jax

  try:
    return bool(jax.devices())
  except (RuntimeError, AssertionError):
    return False
