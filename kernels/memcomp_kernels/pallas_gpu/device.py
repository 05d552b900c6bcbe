"""Says where a Pallas GPU kernel can run, and how it runs there."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels import dispatch

_MODE: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "mosaic_gpu", default=None
)
_LOWER = "lower"


@contextlib.contextmanager
def interpreted(**params) -> Iterator[None]:
  """Context in which kernels run in the interpreter, on any platform.

  Args:
    **params: Arguments of `plgpu.InterpretGPUParams`, such as
      detect_races=True.
  """
  token = _MODE.set(plgpu.InterpretGPUParams(**params))
  try:
    yield
  finally:
    _MODE.reset(token)


def tried(**params) -> contextlib.AbstractContextManager[None]:
  """Context in which kernels run on a GPU if it supports them.

  Otherwise they run in the interpreter, as in `interpreted`. Tests use this
  context: with JAX_PLATFORMS=cuda,cpu they test the real kernels.

  Args:
    **params: Arguments of `interpreted`.
  """
  if unavailable() is None:
    return contextlib.nullcontext()
  return interpreted(**params)


@contextlib.contextmanager
def lowered() -> Iterator[None]:
  """Context in which kernels are lowered for GPUs, on any devices."""
  token = _MODE.set(_LOWER)
  try:
    yield
  finally:
    _MODE.reset(token)


def interpret() -> Any:
  """Returns the `interpret` argument for a `plgpu.kernel` in this context."""
  mode = _MODE.get()
  return False if mode is None or mode == _LOWER else mode


def unavailable() -> str | None:
  """Returns why kernels cannot run here, or None if they can."""
  if _MODE.get() is not None:
    return None
  platform = dispatch.current_platform()
  if platform != "gpu":
    return f"it is a GPU kernel, and the devices in use are of {platform}"
  device = dispatch.default_device()
  capability = str(getattr(device, "compute_capability", "unknown"))
  if not capability.startswith("9."):
    return (
      "it is for GPUs of compute capability 9 (Hopper), and "
      f"{device.device_kind} has {capability}"
    )
  return None
