"""Says where a Pallas TPU kernel can run, and how it runs there."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels import dispatch

_MODE: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "mosaic_tpu", default=None
)


@contextlib.contextmanager
def interpreted(**params) -> Iterator[None]:
  """Context in which kernels run in the interpreter, on any platform.

  Args:
    **params: Arguments of `pltpu.InterpretParams`, such as detect_races=True.
  """
  token = _MODE.set(pltpu.InterpretParams(**params))
  try:
    yield
  finally:
    _MODE.reset(token)


@contextlib.contextmanager
def compiled(kind: str | None = None) -> Iterator[None]:
  """Context in which kernels are lowered for TPUs, on any devices.

  Args:
    kind: Kind of TPU that kernels are lowered for, such as "v5e"; None for any.
  """
  token = _MODE.set(("compile", kind))
  try:
    yield
  finally:
    _MODE.reset(token)


def interpret() -> Any:
  """Returns the `interpret` argument for a `pallas_call` in this context."""
  mode = _MODE.get()
  return False if mode is None or isinstance(mode, tuple) else mode


def kind() -> str | None:
  """Returns the TPU kind that kernels are for, such as "v5e", or None.

  None means that the kind is unknown.
  """
  mode = _MODE.get()
  if isinstance(mode, tuple):
    return mode[1]
  names = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
  return names.get(dispatch.current_device_kind())


def unavailable() -> str | None:
  """Returns why kernels cannot run here, or None if they can."""
  platform = dispatch.current_platform()
  if _MODE.get() is None and platform != "tpu":
    return f"it is a TPU kernel, and the devices in use are of {platform}"
  return None
