"""A jax.profiler trace of a window of steps."""

import pathlib
from collections.abc import Callable

import jax

from memcomp import config as config_lib


class Window:
  """Traces steps [profile_start, profile_start + profile_steps), from 0.

  A process that begins later traces its first `profile_steps` steps. Use it in
  `with`, so that a run that ends inside the window ends the trace.
  """

  def __init__(
    self,
    config: config_lib.TrainingConfig,
    workdir: pathlib.Path,
    say: Callable[[str], None],
    *,
    first: int = 0,
  ):
    """Plans the trace.

    Args:
      config: has the window.
      workdir: folder for the trace.
      say: prints a line.
      first: index of the process's first step.
    """
    self._say = say
    self._on = config.profile_start >= 0
    self._start = max(config.profile_start, first)
    self._stop = self._start + config.profile_steps
    self._directory = workdir / "profile"
    self._tracing = False

  def before(self, index: int) -> None:
    """Call this before the step with this index starts."""
    if self._on and index == self._start:
      jax.profiler.start_trace(self._directory)
      self._tracing = True

  def after(self, index: int, result: object) -> None:
    """Call this with the result of the step with this index."""
    if self._tracing and index + 1 >= self._stop:
      jax.block_until_ready(result)
      self._end()

  def __enter__(self) -> "Window":
    return self

  def __exit__(self, *unused) -> None:
    if self._tracing:
      self._end()

  def _end(self) -> None:
    self._tracing = False
    jax.profiler.stop_trace()
    self._say(f"profiler trace: {self._directory}")
