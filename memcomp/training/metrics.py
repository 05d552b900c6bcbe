"""Metrics: device numbers, log files, and the line on the terminal."""

import errno
import json
import math
import os
import pathlib
import sys
import time
from typing import Any, TextIO

import numpy as np

from memcomp import disk, errors, streams
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.training import processes

FILE = "metrics.jsonl"
SOLVER = ("sweeps", "residual", "unreached")


def record_of(fetched: dict[str, np.ndarray]) -> dict[str, Any]:
  """Returns a step's metrics for the log, without timings.

  They are equal in every run of a config.

  Args:
    fetched: metrics of `step.make_train_step`, on the host.

  Returns:
    `step`; `loss` in nats per scored token; `bits_per_byte` (loss * tokens /
    bytes / ln 2); `learning_rate`; `grad_norm` before clipping; `z_loss`
    (weighted); `memory_norms`, the RMS of each layer's memory; `skipped` steps
    so far; `tokens` scored in the step. If layers use sweeps (`SolverConfig`),
    for each layer: mean `sweeps` per tile, the largest `residual`, and
    `unreached`, the number of tiles that fell back to substitution. For a task,
    where an answer counts as a byte, `accuracy`: the share of right answers.
    Means are None if no token was scored.
  """
  loss, tokens = float(fetched["loss"]), int(fetched["tokens"])
  record = {
    "step": int(fetched["step"]),
    "loss": loss if tokens else None,
    "bits_per_byte": tokenizer_lib.bits_per_byte(
      loss * tokens, int(fetched["bytes"])
    ),
    "learning_rate": float(fetched["learning_rate"]),
    "grad_norm": float(fetched["grad_norm"]),
    "z_loss": float(fetched["z_loss"]),
    "memory_norms": [float(x) for x in fetched["memory_norms"]],
    "skipped": int(fetched["skipped"]),
    "tokens": tokens,
  }
  if "accuracy" in fetched:
    record["accuracy"] = float(fetched["accuracy"]) if tokens else None
  for name in SOLVER:
    if name in fetched:
      record[name] = [float(x) for x in fetched[name]]
  return record


class Log:
  """Writes metrics.jsonl, and optionally TensorBoard files.

  Use it in `with`; a line is on disk as soon as `write` returns.
  """

  def __init__(
    self, workdir: pathlib.Path, *, resume_at: int, tensorboard: bool
  ):
    """Opens the files, and drops log lines after `resume_at`.

    Args:
      workdir: folder of the run.
      resume_at: step from which training resumes.
      tensorboard: whether to also write `tensorboard/`.

    Raises:
      UserError: the TensorBoard library is missing; a full disk.
    """
    self._path = workdir / FILE
    self._board = _board(workdir, resume_at) if tensorboard else None
    truncate(self._path, resume_at)
    with disk.clear_errors(f"cannot write {self._path}"):
      self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115

  def check_place(self) -> None:
    """Checks that the run's folder is still there.

    An open file does not tell: what is written to it is lost with the folder.

    Raises:
      UserError: the folder was removed or moved.
    """
    with disk.clear_errors(f"cannot write {self._path}"):
      if not self._path.exists():
        raise errors.UserError(
          f"{self._path} is gone: it or the run's folder was removed or moved"
          " in mid-run; put it back, and the same command goes on from the last"
          " checkpoint"
        )

  def write(self, record: dict[str, Any]) -> None:
    """Appends one object; numbers that are not finite become null.

    Raises:
      UserError: a full disk; see `check_place`.
    """
    self.check_place()
    with disk.clear_errors(f"cannot write {self._path}"):
      self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
      self._file.flush()
    if self._board is None:
      return
    for name, value in record.items():
      values = value if isinstance(value, list) else [value]
      for number, x in enumerate(values):
        if isinstance(x, int | float) and name != "step":
          tag = f"{name}/{number}" if isinstance(value, list) else name
          self._board.add_scalar(tag, x, record["step"])

  def __enter__(self) -> "Log":
    return self

  def __exit__(self, *unused) -> None:
    # Closing retries a write that a full disk rejected.
    with disk.clear_errors(f"cannot write {self._path}"):
      self._file.close()
    if self._board is not None:
      self._board.close()


def open_log(
  workdir: pathlib.Path, *, resume_at: int, tensorboard: bool
) -> Log:
  """Returns the run's `Log` in the first process; others log nothing."""
  if processes.is_first():
    return Log(workdir, resume_at=resume_at, tensorboard=tensorboard)
  return _NoLog()


class _NoLog(Log):
  """The log of a process that writes nothing."""

  def __init__(self):
    pass

  def check_place(self) -> None:
    pass

  def write(self, record: dict[str, Any]) -> None:
    del record

  def __exit__(self, *unused) -> None:
    pass


def truncate(path: pathlib.Path, step: int) -> None:
  """Drops the lines after `step`, and those that cannot be read."""
  if not path.exists():
    return
  lines = path.read_bytes().splitlines(keepends=True)
  kept = [line for line in lines if _is_of(line, step)]
  with disk.clear_errors(f"cannot write {path}"):
    if kept == lines[: len(kept)]:
      os.truncate(path, sum(map(len, kept)))  # also on a full disk
      return
    with disk.replacing(path) as temporary:
      temporary.write_bytes(b"".join(kept))


def _is_of(line: bytes, step: float) -> bool:
  """Whether a line is a whole record of a step up to `step`."""
  try:
    return line.endswith(b"\n") and json.loads(line)["step"] <= step
  except (*errors.BAD_JSON, KeyError, TypeError):
    return False


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records of a metrics.jsonl; skips lines that are none."""
  lines = pathlib.Path(path).read_bytes().splitlines(keepends=True)
  return [json.loads(line) for line in lines if _is_of(line, math.inf)]


def number(value: float | None, digits: int) -> str:
  """Formats a number for the terminal; None means that nothing was scored."""
  return "of nothing" if value is None else f"{value:.{digits}f}"


class StepProgress:
  """A line that updates itself on a terminal; one line per record elsewhere.

  Attributes:
    unread: why to stop if the reader of a pipe has ended (`| head`), else "".
  """

  def __init__(self, steps: int, stream: TextIO | None = None):
    """Prepares the line; `steps` is the number of steps of the run."""
    self.unread = ""
    self._steps = steps
    self._stream = sys.stdout if stream is None else stream
    self._live = self._stream.isatty()
    self._open = False
    self._seconds: float | None = None

  def show(self, record: dict[str, Any]) -> None:
    """Shows step, loss, bits per byte or accuracy, tokens/s and time left."""
    quality = f"{number(record['bits_per_byte'], 3)} bits/byte"
    validation = "validation_bits_per_byte"
    if "accuracy" in record:
      quality = f"accuracy {number(record['accuracy'], 3)}"
      validation = "validation_accuracy"
    parts = [f"step {record['step']}/{self._steps}"]
    if record["loss"] is None:
      parts.append("nothing was scored")
    else:
      parts += [f"loss {record['loss']:.4f}", quality]
    if validation in record:
      parts.append(f"validation {number(record[validation], 3)}")
    if record["skipped"]:
      parts.append(f"skipped {record['skipped']}")
    if unreached := round(sum(record.get("unreached", ()))):
      parts.append(f"solved by substitution {unreached}")
    if "seconds_per_step" in record:
      seconds = record["seconds_per_step"]
      # Use a moving mean, because checkpoints and other load make single
      # intervals vary.
      before = seconds if self._seconds is None else self._seconds
      self._seconds = 0.7 * before + 0.3 * seconds
      speed = record["tokens_per_second"] * seconds / self._seconds
      left = (self._steps - record["step"]) * self._seconds
      parts += [f"{speed:,.0f} tokens/s", f"{duration(left)} left"]
    line = "  ".join(parts)
    self._write(f"\r{line}\x1b[K" if self._live else line + "\n")
    self._open = self._live

  def say(self, text: str) -> None:
    """Prints a line of its own."""
    self.end()
    self._write(text + "\n")

  def end(self) -> None:
    """Ends the line, so that the next output starts a new one."""
    if self._open:
      self._open = False
      self._write("\n")

  def _write(self, text: str) -> None:
    try:
      self._stream.write(text)
      self._stream.flush()
    except BrokenPipeError:
      streams.drop_output()
      self.unread = "the output has no reader"
    except OSError as error:
      if error.errno != errno.EIO:  # a terminal that is gone; SIGHUP follows
        raise

  def __enter__(self) -> "StepProgress":
    return self

  def __exit__(self, *unused) -> None:
    self.end()


class Meter:
  """Seconds per step between two logged steps, without pauses."""

  def __init__(self):
    self._step: int | None = None
    self._start = 0.0
    self._paused = 0.0

  def lap(self, step: int) -> float | None:
    """Returns seconds per step since the last lap; None for the first."""
    now = time.perf_counter()
    seconds = None
    if self._step is not None and step > self._step:
      seconds = (now - self._start - self._paused) / (step - self._step)
    self._step, self._start, self._paused = step, now, 0.0
    return seconds

  def pause(self, seconds: float) -> None:
    """Excludes time that was not spent training."""
    self._paused += seconds


def duration(seconds: float) -> str:
  """Formats seconds as 12s, 3m12s or 2h03m."""
  seconds = round(seconds)
  if seconds < 60:
    return f"{seconds}s"
  if seconds < 3600:
    return f"{seconds // 60}m{seconds % 60:02d}s"
  return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def _finite(value: Any) -> Any:
  if isinstance(value, dict):
    return {k: _finite(v) for k, v in value.items()}
  if isinstance(value, list):
    return [_finite(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _board(workdir: pathlib.Path, resume_at: int) -> Any:
  try:
    import tensorboardX
  except ImportError as error:
    raise errors.UserError(
      "training.tensorboard needs tensorboardX: pip install 'memcomp[tb]', or "
      "set training.tensorboard to false"
    ) from error
  return tensorboardX.SummaryWriter(
    str(workdir / "tensorboard"), purge_step=resume_at + 1
  )
