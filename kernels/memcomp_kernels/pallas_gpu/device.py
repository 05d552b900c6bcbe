"""Where a Pallas GPU kernel may run, and how."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels import dispatch

_MODE: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "mosaic_gpu", default=None
)
_LOWER = "lower"


@contextlib.contextmanager
def interpreted(**params) -> Iterator[None]:
  """Inside, kernels are interpreted, on any platform.

  Args:
    **params: of `plgpu.InterpretGPUParams`, such as detect_races=True.
  """
  token = _MODE.set(plgpu.InterpretGPUParams(**params))
  try:
    yield
  finally:
    _MODE.reset(token)


def tried(**params) -> contextlib.AbstractContextManager[None]:
  """Inside, kernels run on a GPU that has them, and else as in `interpreted`.

  Tests run so: with JAX_PLATFORMS=cuda they are tests of the real kernels.

  Args:
    **params: as there.
  """
  if unavailable() is None:
    return contextlib.nullcontext()
  return interpreted(**params)


@contextlib.contextmanager
def lowered() -> Iterator[None]:
  """Inside, kernels are lowered for GPUs, whatever devices are in use."""
  token = _MODE.set(_LOWER)
  try:
    yield
  finally:
    _MODE.reset(token)


def interpret() -> Any:
  """The `interpret` argument of a `plgpu.kernel` here."""
  mode = _MODE.get()
  return False if mode is None or mode == _LOWER else mode


def unavailable() -> str | None:
  """Why kernels cannot run here, or None."""
  if _MODE.get() is not None:
    return None
  platform = dispatch.current_platform()
  if platform != "gpu":
    return f"it is a GPU kernel, and the devices in use are of {platform}"
  device = jax.devices()[0]
  capability = str(getattr(device, "compute_capability", "unknown"))
  if not capability.startswith("9."):
    return (
      "it is for GPUs of compute capability 9 (Hopper), and "
      f"{device.device_kind} has {capability}"
    )
  return None
