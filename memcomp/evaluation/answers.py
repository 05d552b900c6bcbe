"""Answers of a model to rows of a synthetic task, by one forward pass each."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp import errors, limits
from memcomp.data.synthetic import task as task_lib
from memcomp.evaluation import load, report
from memcomp.models import decoder

_CALL_TOKENS = 1 << 14
BINS = 15
"""Number of bins of the calibration error."""


class Answers(NamedTuple):
  """Answers `[rows, questions]`, in the order of the questions.

  Attributes:
    right: whether the most likely id is the answer.
    nats: -log p of the answer, over all ids.
    confidence: p of the most likely id.
  """

  right: np.ndarray
  nats: np.ndarray
  confidence: np.ndarray


def task_of(checkpoint: load.Checkpoint, name: str) -> task_lib.TaskConfig:
  """Returns the task that a checkpoint was trained on.

  Raises:
    UserError: it is not the task called `name`.
  """
  task = checkpoint.config.data.task
  if task is None or task.name != name:
    what = "text" if task is None else f"rows of task {task.name}"
    raise errors.UserError(
      f"--task={name}: {checkpoint.config.name} was trained on {what}; train"
      f" with --config=configs/{name}.py, or give another --task"
    )
  return task


def take(rows: task_lib.Rows, count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens and targets of the first rows, int32 `[count, time]`."""
  taken = [rows[i] for i in range(count)]
  return (
    np.stack([row.tokens for row in taken]),
    np.stack([row.targets for row in taken]),
  )


def measure(
  model: decoder.Decoder,
  tokens: np.ndarray,
  targets: np.ndarray,
  progress: Callable[[int], None] = lambda rows: None,
) -> Answers:
  """Answers every row from a fresh state.

  Args:
    model: the language model.
    tokens: int32 `[rows, time]`.
    targets: int32 `[rows, time]`, -1 without a question; all rows have the same
      number of questions.
    progress: called with the number of finished rows.

  Raises:
    UserError: the model computes what is not finite.
  """
  graphdef, params = nnx.split(model)
  asked = np.count_nonzero(targets[0] >= 0)
  where = np.argsort(targets < 0, axis=1, kind="stable")[:, :asked]
  wanted = np.take_along_axis(targets, where, axis=1)
  count, time = tokens.shape
  # Rows of the first call fill the last one, so that it need not compile.
  size = min(count, max(1, _CALL_TOKENS // time))
  parts = []
  for first in range(0, count, size):
    chosen = np.arange(first, first + size) % count
    found = _answer(
      graphdef, params, tokens[chosen], where[chosen], wanted[chosen]
    )
    kept = min(size, count - first)
    parts.append([np.asarray(x)[:kept] for x in found])
    progress(kept)
  answers = Answers(*(np.concatenate(x) for x in zip(*parts, strict=True)))
  limits.check_computed(answers.nats)
  return answers


@functools.partial(jax.jit, static_argnums=0)
def _answer(graphdef, params, tokens, where, wanted):
  model: Any = nnx.merge(graphdef, params)
  hidden, _ = model.hidden(tokens)
  # Logits of all tokens would take far more memory than those of the questions.
  hidden = jnp.take_along_axis(hidden, where[..., None], axis=1)
  logs = jax.nn.log_softmax(model.logits(hidden).astype(jnp.float32))
  chosen = jnp.take_along_axis(logs, wanted[..., None], axis=-1)[..., 0]
  return jnp.argmax(logs, axis=-1) == wanted, -chosen, jnp.exp(logs.max(-1))


def calibration_error(answers: Answers) -> float:
  """Expected calibration error: mean of |accuracy - confidence| over `BINS`.

  Bins of confidence have equal widths; their weight is their number of answers.
  """
  confidence = answers.confidence.ravel().astype(np.float64)
  number = np.minimum((confidence * BINS).astype(int), BINS - 1)
  gap = np.bincount(number, answers.right.ravel() - confidence, BINS)
  return float(np.abs(gap).sum() / confidence.size)


def summary(answers: Answers) -> dict[str, float | None]:
  """Returns the figures of a slice.

  Returns:
    `accuracy`, the mean over rows of the share of right answers; its standard
    error over rows, `accuracy_error`, None for one row; `nats` per answer;
    `calibration_error`.
  """
  by_row = answers.right.mean(axis=1)
  error = report.deviation(by_row)
  if error is not None:
    error /= len(by_row) ** 0.5
  return {
    "accuracy": float(by_row.mean()),
    "accuracy_error": error,
    "nats": float(answers.nats.mean(dtype=np.float64)),
    "calibration_error": calibration_error(answers),
  }


def accuracy(figures: Mapping[str, Any]) -> str:
  """Returns accuracy and its error as columns of a slice's line."""
  error = figures["accuracy_error"]
  spread = f"{'-':>11} " if error is None else f"(+-{error:>8.4f})"
  return f"{figures['accuracy']:>8.4f}  {spread}"
