"""loss.png: the training and validation curves of metrics.jsonl."""

import pathlib

from memcomp import figures
from memcomp.training import metrics


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
  axes.set(xlabel="step", ylabel="bits per byte", title=workdir.name)
  axes.grid(alpha=0.3)
  if axes.lines:
    axes.legend()
  return f"loss curve: {figures.save(canvas, path)}"
