"""loss.png: the training and validation curves of metrics.jsonl."""

import pathlib

from memcomp.training import disk, metrics


def loss_curve(workdir: pathlib.Path) -> str:
  """Draws `loss.png` beside metrics.jsonl.

  Returns:
    A line for the terminal: where it is, or why there is none.
  """
  try:
    from matplotlib import figure
  except ImportError:
    return (
      "no loss.png: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
  records = metrics.read(workdir / metrics.FILE)
  # A figure without pyplot: no backend to choose, no window, no global state.
  canvas = figure.Figure(figsize=(7, 4), layout="constrained")
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
  path = workdir / "loss.png"
  with (
    disk.clear_errors(f"cannot write {path}"),
    disk.replacing(path) as temporary,
  ):
    canvas.savefig(temporary, dpi=120, format="png")
  return f"loss curve: {path}"
