"""A figure of results against one number, with a panel per metric."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcomp import figures

_COLOURS = 10
"""Length of matplotlib's colour cycle; further lines are dashed."""


class Panel(NamedTuple):
  """One pair of axes.

  Attributes:
    label: label of the vertical axis.
    lines: name -> value at each x; the name "" is not in the legend.
    limits: limits of the vertical axis; None is automatic.
    bars: name -> half lengths of error bars; None has no bar.
    log: whether the vertical axis is logarithmic.
  """

  label: str
  lines: Mapping[str, Sequence[float]]
  limits: tuple[float | None, float | None] = (None, None)
  bars: Mapping[str, Sequence[float | None]] | None = None
  log: bool = False


def draw(
  x: Sequence[float],
  panels: Sequence[Panel],
  *,
  xlabel: str,
  title: str,
  path: pathlib.Path,
  names: Sequence[str] | None = None,
  mark: tuple[float, str] | None = None,
  log: bool = True,
) -> pathlib.Path | str:
  """Draws panels side by side.

  Args:
    x: positions of all values.
    panels: panels to draw.
    xlabel: label of the horizontal axes.
    title: title of the figure.
    path: path of the PNG.
    names: names of the positions; None shows their numbers.
    mark: position and label of a vertical line.
    log: whether the horizontal axis is logarithmic.

  Returns:
    `path`, or a line that explains why there is no figure.
  """
  canvas = figures.new_canvas(5.5 * len(panels), 4)
  if canvas is None:
    return figures.MISSING.format(path.name)
  (row,) = canvas.subplots(1, len(panels), squeeze=False)
  for axes, panel in zip(row, panels, strict=True):
    for number, (name, values) in enumerate(panel.lines.items()):
      bars = (panel.bars or {}).get(name)
      axes.errorbar(
        x,
        values,
        yerr=bars and [math.nan if x is None else x for x in bars],
        linestyle="-" if number < _COLOURS else "--",
        marker="o",
        markersize=4,
        capsize=3,
        label=name or None,
      )
    if log:
      axes.set_xscale("log", base=2)
    axes.set_xticks(x, names or [f"{v:g}" for v in x], fontsize="small")
    axes.minorticks_off()
    if panel.log:
      axes.set_yscale("log")
    axes.set_ylim(*panel.limits)
    axes.set(xlabel=xlabel, ylabel=panel.label)
    axes.grid(alpha=0.3)
    if mark is not None:
      axes.axvline(mark[0], color="tab:red", linewidth=1, label=mark[1])
  canvas.suptitle(title)
  handles, labels = row[0].get_legend_handles_labels()
  if handles:
    canvas.legend(
      handles,
      labels,
      loc="outside lower center",
      fontsize="small",
      ncols=4 if len(panels) > 1 else 3,
    )
  return figures.save(canvas, path)
