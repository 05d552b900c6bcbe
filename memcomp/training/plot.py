"""loss.png: the training and validation curves of metrics.jsonl."""

import math
import pathlib

from memcomp import figures
from memcomp.training import metrics

_FEW = 10
"""Points of a curve that is drawn whole."""


def loss_curve(workdir: pathlib.Path) -> str:
  """Draws `loss.png` beside metrics.jsonl.

  Returns:
    A line for the terminal: the path, or why there is no figure.
  """
  path = workdir / "loss.png"
  canvas = figures.new_canvas(7, 4)
  if canvas is None:
    return figures.MISSING.format(path.name)
  records = metrics.read(workdir / metrics.FILE)
  axes = canvas.subplots()
  for name, label in (
    ("bits_per_byte", "training"),
    ("validation_bits_per_byte", "validation"),
  ):
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    if points:
      axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
  later = [y for line in axes.lines for y in line.get_ydata()[1:]]
  if limits := _limits([y for y in later if math.isfinite(y)]):
    axes.set_ylim(*limits)
  axes.set(xlabel="step", ylabel="bits per byte", title=workdir.name)
  axes.grid(alpha=0.3)
  if axes.lines:
    axes.legend()
  return f"loss curve: {figures.save(canvas, path)}"


def _limits(values: list[float]) -> tuple[float, float] | None:
  """Returns limits that leave out the fall of the first steps, or None.

  It begins far above all that follows, and would flatten it.
  """
  if len(values) <= _FEW:
    return None
  low, high = min(values), sorted(values)[int(0.95 * len(values))]
  if low == high:
    return None
  return low - 0.1 * (high - low), high + 0.5 * (high - low)
