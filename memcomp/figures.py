"""Creates and saves figures."""

import pathlib
import warnings
from typing import Any

from memcomp import disk

MISSING = "no {}: matplotlib is not installed (pip install 'memcomp[plot]')"
"""Message for a figure that cannot be drawn."""


def new_canvas(width: float, height: float) -> Any:
  """Returns an empty figure, size in inches; None without matplotlib."""
  try:
    from matplotlib import figure
  except ImportError:
    return None
  # Figure avoids pyplot's backends, windows and global state.
  return figure.Figure(figsize=(width, height), layout="constrained")


def save(canvas: Any, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure as PNG; returns the path.

  It prints all text literally, because names of runs and folders may contain
  any character.
  """
  from matplotlib import text

  for one in canvas.findobj(text.Text):
    shown = one.get_text()
    # Axis numbers are not drawn yet, so their own markup stays.
    if "$" in shown:
      one.set_parse_math(False)
    one.set_text(shown.encode(errors="backslashreplace").decode())
  with (
    disk.clear_errors(f"cannot write {path}"),
    disk.replacing(path) as temporary,
    warnings.catch_warnings(),
  ):
    # A character that the font lacks becomes a box.
    warnings.filterwarnings("ignore", "Glyph", UserWarning)
    canvas.savefig(temporary, dpi=120, format="png")
  return path
