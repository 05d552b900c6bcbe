"""A figure of results by one number: a panel for each figure of merit."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memcomp import figures

_COLOURS = 10
"""Of matplotlib's cycle: lines beyond are dashed."""


class Panel(NamedTuple):
  """One pair of axes.

  Attributes:
    label: of the vertical axis.
    lines: name -> value at each x; a name of "" stands in no legend.
    limits: of the vertical axis; None leaves it, or one of them.
    bars: name -> half the length of its error bars.
    log: whether the vertical axis is logarithmic.
  """

  label: str
  lines: Mapping[str, Sequence[float]]
  limits: tuple[float | None, float | None] = (None, None)
  bars: Mapping[str, Sequence[float]] | None = None
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
    panels: what to draw.
    xlabel: of the horizontal axes.
    title: of the figure.
    path: of the PNG.
    names: of the positions; None is their numbers.
    mark: a vertical line, and what it says.
    log: whether the horizontal axis is logarithmic.

  Returns:
    `path`, or a line that says why there is no figure.
  """
  canvas = figures.new_canvas(5.5 * len(panels), 4)
  if canvas is None:
    return figures.MISSING.format(path.name)
  (row,) = canvas.subplots(1, len(panels), squeeze=False)
  for axes, panel in zip(row, panels, strict=True):
    for number, (name, values) in enumerate(panel.lines.items()):
      axes.errorbar(
        x,
        values,
        yerr=(panel.bars or {}).get(name),
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
