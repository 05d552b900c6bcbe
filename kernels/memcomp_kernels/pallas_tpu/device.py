"""Where a Pallas TPU kernel may run, and how."""

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
  """Inside, kernels are interpreted, on any platform.

  Args:
    **params: of `pltpu.InterpretParams`, such as detect_races=True.
  """
  token = _MODE.set(pltpu.InterpretParams(**params))
  try:
    yield
  finally:
    _MODE.reset(token)


@contextlib.contextmanager
def compiled(kind: str | None = None) -> Iterator[None]:
  """Inside, kernels are lowered for TPUs, whatever devices are in use.

  Args:
    kind: of TPU that they are laid out for, such as "v5e"; None for any.
  """
  token = _MODE.set(("compile", kind))
  try:
    yield
  finally:
    _MODE.reset(token)


def interpret() -> Any:
  """The `interpret` argument of a `pallas_call` here."""
  mode = _MODE.get()
  return False if mode is None or isinstance(mode, tuple) else mode


def kind() -> str | None:
  """The kind of TPU that kernels are for, such as "v5e"; None if unknown."""
  mode = _MODE.get()
  if isinstance(mode, tuple):
    return mode[1]
  names = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
  return names.get(dispatch.current_device_kind())


def unavailable() -> str | None:
  """Why kernels cannot run here, or None."""
  platform = dispatch.current_platform()
  if _MODE.get() is None and platform != "tpu":
    return f"it is a TPU kernel, and the devices in use are of {platform}"
  return None
