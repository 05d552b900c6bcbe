"""Figures of curves and results: empty ones, and saving them."""

import pathlib
import warnings
from typing import Any

from memcomp import disk

MISSING = "no {}: matplotlib is not installed (pip install 'memcomp[plot]')"
"""What is said of a figure that cannot be drawn."""


def new_canvas(width: float, height: float) -> Any:
  """Returns an empty figure of so many inches; None without matplotlib."""
  try:
    from matplotlib import figure
  except ImportError:
    return None
  # Without pyplot: no backend to choose, no window, no global state.
  return figure.Figure(figsize=(width, height), layout="constrained")


def save(canvas: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as PNG; returns where.

  All text stands in it as it is: names of runs and folders may hold any sign.
  """
  from matplotlib import text

  for one in canvas.findobj(text.Text):
    shown = one.get_text()
    # Numbers at axes are not written yet; their own markup is left alone.
    if "$" in shown:
      one.set_parse_math(False)
    one.set_text(shown.encode(errors="backslashreplace").decode())
  with (
    disk.clear_errors(f"cannot write {path}"),
    disk.replacing(path) as temporary,
    warnings.catch_warnings(),
  ):
    # A sign that the font has not becomes a box.
    warnings.filterwarnings("ignore", "Glyph", UserWarning)
    canvas.savefig(temporary, dpi=120, format="png")
  return path
