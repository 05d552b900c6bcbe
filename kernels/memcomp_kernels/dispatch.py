"""Chooses an implementation by name, or the best one for the platform.

The platform is the one of the devices in use. When a program is compiled for a
pod that is not there, these are the devices of the mesh, and
`jax.default_backend()` would say "cpu". A named implementation never falls back
silently: if it cannot run, it raises.

`mosaic_*` are kernels of this repository. `library_*` are kernels that a
library provides.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from memcomp_kernels import contract

_logger = logging.getLogger("memcomp")

_KERNELS = {
  "tpu": ("mosaic_tpu", "library_tpu"),
  "gpu": ("mosaic_gpu", "library_gpu"),
}
_EVERYWHERE = ("xla_chunked", "reference")
_FIRST: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
  "preferred", default=()
)
KERNELS = *_KERNELS["tpu"], *_KERNELS["gpu"]
"""Names of kernels that run on one platform only.

They have no float64. Their own tests compare them with the XLA form.
"""
# Their calls do not say over which axes of a `shard_map` results vary.
_UNTYPED = ("library_tpu", "mosaic_gpu", "library_gpu")
NAMES = "reference", "xla_chunked", *KERNELS


@contextlib.contextmanager
def default_implementation(name: str) -> Iterator[None]:
  """Sets the implementation that memories prefer inside the context.

  This is for whole models, whose layers name no implementation. It affects
  programs that are traced inside the context. Where the preferred
  implementation does not support a call, a warning says why.

  Args:
    name: name of an implementation, or empty for no preference.

  Raises:
    NotImplementedError: no implementation has this name.
  """
  if name:
    _check_name(name)
  token = _FIRST.set((name,) if name else ())
  try:
    yield
  finally:
    _FIRST.reset(token)


def current_platform() -> str:
  """Returns the platform of the mesh in use, else of the default device."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  platform = getattr(device, "platform", None) or default_device().platform
  return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def current_device_kind() -> str:
  """Returns the device kind of the mesh in use, else of the default device."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  kind = getattr(device, "device_kind", None)
  return kind or default_device().device_kind


def default_device() -> jax.Device:
  """Returns the device on which programs of uncommitted arrays run."""
  chosen = jax.config.jax_default_device
  if isinstance(chosen, str):  # a platform
    return jax.devices(chosen)[0]
  return chosen or jax.devices()[0]


def _check_name(name: str) -> None:
  if name not in NAMES:
    raise NotImplementedError(
      f"implementation {name!r} is unknown; choose from {', '.join(NAMES)}"
    )


@functools.cache
def _log_once(message: str, level: int = logging.INFO) -> None:
  _logger.log(level, message)


class Call(NamedTuple):
  """One call of a memory's `chunk`: what every implementation takes.

  Attributes:
    state: the state before the first token.
    inputs: `[batch, time, heads, ...]` arrays.
    spec: the memory's options.
    segment_ids: `[batch, time]`, or None for one segment.
    reset_state: the state that new segments start from. None means `state`,
      which is then fresh.
    max_position: an upper bound of the number of tokens in `state` and in
      `reset_state`, or None.
    tiling: performance options, or None.
  """

  state: Any
  inputs: Any
  spec: Any
  segment_ids: jax.Array | None = None
  reset_state: Any = None
  max_position: int | None = None
  tiling: Any = None

  @property
  def reset(self) -> Any:
    """The state that new segments start from."""
    return self.state if self.reset_state is None else self.reset_state


@dataclasses.dataclass(frozen=True)
class Kernel:
  """An implementation whose module is imported when a call first needs it.

  Kernels import Pallas, which takes longer than all other imports.

  Attributes:
    module: name of the module. It has a function `unsupported`, which says why
      it does not support a call, or returns None.
    xla: the XLA form whose tiles the module's `ENGINE` runs, as a function of
      the call and the engine. None means that the module has an implementation
      of its own, `chunk`.
  """

  module: str
  xla: Callable[..., Any] | None = None

  def __call__(self, call: Call) -> tuple:
    """Runs the implementation."""
    module = importlib.import_module(self.module)
    if self.xla is None:
      return module.chunk(call)
    return self.xla(call, module.ENGINE)

  def unsupported(self, call: Call) -> str | None:
    """Says why the implementation does not support `call`, or returns None."""
    return importlib.import_module(self.module).unsupported(call)


class Implementations:
  """The implementations of one memory, by name.

  Attributes:
    memory: name of the memory.
    functions: functions by name: `Call` -> (state, outputs) or (state, outputs,
      statistics or None).
    tiling: names of the functions that read a `tiling`.
  """

  def __init__(
    self,
    memory: str,
    tiling: tuple[str, ...] = (),
    **functions: Callable,
  ):
    self.memory = memory
    self.functions = functions
    self.tiling = tiling

  def default(self, platform: str) -> str:
    """Returns the implementation that `platform` uses by default.

    If it does not support a call, `choose` tries the next one.
    """
    return next(self._preferred(platform))

  def _preferred(self, platform: str):
    preferred = *_KERNELS.get(platform, ()), *_EVERYWHERE
    for name in dict.fromkeys((*_FIRST.get(), *preferred)):
      if name in self.functions:
        yield name

  def reason(self, platform: str) -> str:
    """Explains in one line why `default` returns what it does."""
    chosen = self.default(platform)
    if chosen not in KERNELS and platform in _KERNELS:
      return f"no mosaic_{platform} kernel for {self.memory} yet"
    if isinstance(self.functions[chosen], Kernel):
      return f"fastest form on {platform}, for the calls that it can do"
    return f"fastest form on {platform}"

  def unsupported(self, name: str, call: Call) -> str | None:
    """Says why implementation `name` does not support `call`, or returns None.

    Raises:
      NotImplementedError: no memory has an implementation of that name.
    """
    _check_name(name)
    if name not in self.functions:
      return "there is none"
    time = jax.tree.leaves(call.inputs)[0].shape[1]
    if name != "reference" and not isinstance(time, int):
      return f"time={time} is symbolic; the reference alone takes that"
    given = jax.tree.leaves((call.state, call.inputs, call.reset_state))
    if name in KERNELS and any(x.dtype == "float64" for x in given):
      return "it has no float64"
    if name in _UNTYPED and contract.varying(given):
      return (
        "in a shard_map it needs check_vma=False, for its results do not say"
        " over which mesh axes they vary"
      )
    usual = call.tiling in (None, type(call.tiling)())
    if not usual and name not in self.tiling:
      return f"it has no {call.tiling}: leave tiling out"
    function = self.functions[name]
    if isinstance(function, Kernel):
      return function.unsupported(call)
    return None

  def choose(self, names: str | Sequence[str] | None, call: Call) -> str:
    """Returns the name of the implementation that runs `call`.

    Args:
      names: name of an implementation; or several names in order of preference,
        of which the first that supports the call is chosen; or None for the
        platform's order.
      call: the call to run.

    Raises:
      NotImplementedError: none supports the call; the message says why.
    """
    if isinstance(names, str):
      if names not in self.functions:
        have = ", ".join(self.functions)
        raise NotImplementedError(
          f"{self.memory} has no {names} implementation; it has: {have}"
        )
      if reason := self.unsupported(names, call):
        raise NotImplementedError(f"{self.memory} {names}: {reason}")
      return names
    if names is None:
      return self._best(call)
    words = isinstance(names, Sequence) and all(
      isinstance(name, str) for name in names
    )
    if not words:
      raise TypeError(
        f"{self.memory}: implementation={names!r} must be a name, or several"
      )
    if not names:
      raise ValueError(
        f"{self.memory}: implementation={names!r} names none; leave it out for"
        " the default"
      )
    for name in names:
      _check_name(name)
    reasons = []
    for name in names:
      reason = self.unsupported(name, call)
      if reason is None:
        return name
      reasons.append(f"{name} ({reason})")
    raise NotImplementedError(
      f"{self.memory}: no implementation that was named can do this call:"
      f" {'; '.join(reasons)}"
    )

  def _best(self, call: Call) -> str:
    platform = current_platform()
    for name in self._preferred(platform):
      reason = self.unsupported(name, call)
      if reason is None:
        _log_once(f"{self.memory} on {platform}: {name}")
        return name
      asked_for = name in _FIRST.get()
      _log_once(
        f"{self.memory} on {platform}: not {name}, as {reason}",
        logging.WARNING if asked_for else logging.INFO,
      )
    raise NotImplementedError(f"{self.memory} has no implementation")

  def run(self, names: str | Sequence[str] | None, call: Call) -> tuple:
    """Runs `call` with the implementation that `choose` returns."""
    return self.functions[self.choose(names, call)](call)
