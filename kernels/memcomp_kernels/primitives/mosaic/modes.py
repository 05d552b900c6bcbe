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
def compiled() -> Iterator[None]:
  """Inside, kernels are lowered for TPUs, whatever devices are in use."""
  token = _MODE.set("compile")
  try:
    yield
  finally:
    _MODE.reset(token)


def interpret() -> Any:
  """The `interpret` argument of a `pallas_call` here."""
  mode = _MODE.get()
  return False if mode in (None, "compile") else mode


def unavailable() -> str | None:
  """Why kernels cannot run here, or None."""
  platform = dispatch.current_platform()
  if _MODE.get() is None and platform != "tpu":
    return f"it is a TPU kernel, and the devices in use are of {platform}"
  return None
