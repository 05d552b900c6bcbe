"""Chooses an implementation by name, or the best for the platform.

The platform is that of the devices in use (a mesh's devices when compiling for
a pod), not `jax.default_backend()`, which says "cpu" there. A named
implementation never falls back silently: if it cannot run it raises.

`mosaic_*` are kernels of this repository, `library_*` those that a library
keeps.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax

_logger = logging.getLogger("memcomp")

PREFERENCE = {
  "tpu": ("mosaic_tpu", "library_tpu", "xla_chunked", "reference"),
  # Not mosaic_gpu, which no GPU has run yet: by name only.
  "gpu": ("library_gpu", "xla_chunked", "reference"),
}
DEFAULT_PREFERENCE = ("xla_chunked", "reference")
_FIRST: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
  "preferred", default=()
)
KERNELS = ("mosaic_tpu", "library_tpu", "mosaic_gpu", "library_gpu")
"""Names of kernels for one platform. They have no float64: tests of their own
hold them to the XLA form."""
NAMES = ("reference", "xla_chunked", *KERNELS)


@contextlib.contextmanager
def preferring(name: str) -> Iterator[None]:
  """Inside, memories use the implementation called `name` where it does a call.

  For whole models, whose layers name none: programs that are traced inside.
  Where it does not do a call a warning says why.

  Args:
    name: of an implementation, or empty for no preference.

  Raises:
    NotImplementedError: there is no such implementation.
  """
  if name:
    _check_name(name)
  token = _FIRST.set((name,) if name else ())
  try:
    yield
  finally:
    _FIRST.reset(token)


def current_platform() -> str:
  """The platform of the mesh in use, else of the default device."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  platform = getattr(device, "platform", None) or jax.devices()[0].platform
  return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def current_device_kind() -> str:
  """The kind of device of the mesh in use, else of the default device."""
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  kind = getattr(device, "device_kind", None)
  return kind or jax.devices()[0].device_kind


def _check_name(name: str) -> None:
  if name not in NAMES:
    raise NotImplementedError(
      f"implementation {name!r} is unknown; choose from {', '.join(NAMES)}"
    )


@functools.cache
def _log_once(message: str, level: int = logging.INFO) -> None:
  _logger.log(level, message)


def tiled(
  unsupported: Callable[..., str | None], only: Any = None
) -> Callable[..., str | None]:
  """Returns a limit (inputs, spec, tiling) of one that asks the first two.

  Args:
    unsupported: (inputs, spec) -> why not, or None.
    only: the one tiling that there is; None for any.
  """

  def limit(inputs: Any, spec: Any, tiling: Any) -> str | None:
    if only is not None and tiling not in (None, only):
      return f"it has no {tiling}, the default alone"
    return unsupported(inputs, spec)

  return limit


class Implementations:
  """The implementations of one memory, by name.

  Attributes:
    memory: its name.
    functions: by name.
    limits: by the names of functions that cannot do every call: a function of
      the call (whatever `select` is given) that says why not, or None.
  """

  def __init__(
    self,
    memory: str,
    limits: dict[str, Callable[..., str | None]] | None = None,
    **functions: Callable,
  ):
    self.memory = memory
    self.functions = functions
    self.limits = limits or {}

  def default(self, platform: str) -> str:
    """The name of the implementation that `platform` uses unless told.

    Where it can do the call: `select` goes on to the next if not.
    """
    return next(self._preferred(platform))

  def _preferred(self, platform: str):
    preferred = PREFERENCE.get(platform, DEFAULT_PREFERENCE)
    for name in dict.fromkeys(_FIRST.get() + preferred):
      if name in self.functions:
        yield name

  def reason(self, platform: str) -> str:
    """One line for people: why `default` is what it is."""
    own, preferred = f"mosaic_{platform}", PREFERENCE.get(platform, ())
    chosen = self.default(platform)
    if own in self.functions and own not in preferred:
      return f"{own} by name only: no {platform} has run it yet"
    if chosen not in KERNELS and preferred:
      return f"no {own} kernel for {self.memory} yet"
    if chosen in self.limits:
      return f"fastest form on {platform}, for the calls that it can do"
    return f"fastest form on {platform}"

  def select(self, name: str | None = None, call: tuple = ()) -> Callable:
    """Returns the function called `name`, or the platform's default.

    Args:
      name: of an implementation; None for the first that can do the call.
      call: what `limits` are asked about.

    Raises:
      NotImplementedError: there is no such implementation, or not for this
        memory.
    """
    if name is None:
      platform = current_platform()
      for name in self._preferred(platform):
        limit = self.limits.get(name)
        reason = limit(*call) if limit else None
        if reason is None:
          _log_once(f"{self.memory} on {platform}: {name}")
          return self.functions[name]
        asked_for = name in _FIRST.get()
        _log_once(
          f"{self.memory} on {platform}: not {name}, as {reason}",
          logging.WARNING if asked_for else logging.INFO,
        )
      raise NotImplementedError(f"{self.memory} has no implementation")
    _check_name(name)
    if name not in self.functions:
      have = ", ".join(self.functions)
      raise NotImplementedError(
        f"{self.memory} has no {name} implementation; it has: {have}"
      )
    return self.functions[name]

  def chunk(
    self, check_inputs: Callable[[Any, Any, Any], None]
  ) -> Callable[..., tuple[Any, jax.Array]]:
    """Returns the `chunk` of a memory that takes no options of its own.

    Args:
      check_inputs: (state, inputs, spec), raises ValueError where shapes do
        not fit.
    """

    def chunk(
      state: Any,
      inputs: Any,
      *,
      spec: Any,
      segment_ids: jax.Array | None = None,
      reset_state: Any = None,
      implementation: str | None = None,
    ) -> tuple[Any, jax.Array]:
      """Runs the memory over many tokens; differentiable in state and inputs.

      Args:
        state: the state before the first token.
        inputs: `[batch, time, heads, ...]` arrays, see the memory's `Inputs`.
        spec: the memory's meaning.
        segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
        reset_state: what a new segment starts from; default `state`.
        implementation: "reference" or "xla_chunked"; default the fastest that
          runs on the platform.

      Returns:
        The state after the last token, and `[batch, time, heads, value]` in
        the query's dtype.

      Raises:
        NotImplementedError: the named implementation cannot run here.
        ValueError: shapes do not fit the state or each other.
      """
      check_inputs(state, inputs, spec)
      function = self.select(implementation, (inputs, spec))
      return function(
        state,
        inputs,
        spec=spec,
        segment_ids=segment_ids,
        reset_state=reset_state,
      )

    return chunk
