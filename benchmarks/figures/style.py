"""The style of all diagrams: one colour for each thing, labels on everything.

Colours are those of Okabe and Ito, which the colour-blind can tell apart. No
figure needs them: every box carries its symbol, and gates have dashed edges.
"""

import matplotlib as mpl
import numpy as np
from matplotlib import patches
from matplotlib import pyplot as plt

COLOURS = {
  "query": ("#E3F2FC", "#3E94C9", "-"),
  "key": ("#CFE2F1", "#0072B2", "-"),
  "value": ("#FBE6C2", "#C98A00", "-"),
  "state": ("#CBEADF", "#007F5C", "-"),
  "gate": ("#F5E1EC", "#B5588F", (0, (4, 2))),
  "op": ("#F4F4F4", "#666666", "-"),
  "out": ("#FFFFFF", "#000000", "-"),
}
"""Face, edge and line style of a kind of box."""

_SETTINGS = {
  "font.family": "DejaVu Sans",
  "font.size": 11,
  "mathtext.fontset": "dejavusans",
  "savefig.dpi": 160,
  "savefig.facecolor": "white",
}


class Canvas:
  """A drawing in inches; boxes and grids have names that arrows join.

  Attributes:
    axes: matplotlib's, for what is no box.
    places: centre and half sizes of each named box.
  """

  def __init__(self, width: float, height: float):
    mpl.rcParams.update(_SETTINGS)
    self.figure = plt.figure(figsize=(width, height))
    self.axes = self.figure.add_axes((0, 0, 1, 1))
    self.axes.set(xlim=(0, width), ylim=(0, height))
    self.axes.set_axis_off()
    self.places: dict[str, tuple[float, float, float, float]] = {}

  def box(self, name, x, y, text, kind="op", *, w=0.62, h=0.44, size=11):
    """A rounded box around (x, y)."""
    face, edge, line = COLOURS[kind]
    shape = patches.FancyBboxPatch(
      (x - w / 2, y - h / 2),
      w,
      h,
      boxstyle="round,pad=0,rounding_size=0.07",
      facecolor=face,
      edgecolor=edge,
      linestyle=line,
      linewidth=1.6,
      zorder=3,
    )
    self.axes.add_patch(shape)
    self.text(x, y, text, size=size)
    self.places[name] = (x, y, w / 2, h / 2)

  def grid(self, name, x, y, rows, columns, kind, *, cell=0.2, marked=()):
    """A matrix around (x, y); `marked` (row, column) cells are filled."""
    face, edge, line = COLOURS[kind]
    w, h = columns * cell, rows * cell
    for i, j in np.ndindex(rows, columns):
      corner = x - w / 2 + j * cell, y + h / 2 - (i + 1) * cell
      dark = (i, j) in marked
      self.axes.add_patch(
        patches.Rectangle(
          corner,
          cell,
          cell,
          facecolor=edge if dark else face,
          edgecolor=edge,
          linewidth=0.8,
          linestyle=line,
          zorder=3,
        )
      )
    self.places[name] = (x, y, w / 2, h / 2)

  def decay(self, name, text, *, side="t", w=0.62):
    """A gate that multiplies a state, above it or on its left."""
    x, y, half, high = self.places[name]
    if side == "t":
      at, end = (x, y + high + 0.42), f"{name}.t"
    else:
      at, end = (x - half - 0.5 - w / 2, y), f"{name}.l"
    start = "b" if side == "t" else "r"
    text = "$\\times$ " + text
    self.box(f"{name} decay", *at, text, "gate", w=w, h=0.34, size=10.5)
    self.arrow(f"{name} decay.{start}", end, kind="gate")

  def frame(self, x, y, w, h, text="", *, kind="op", size=10):
    """A frame around a group, corner at (x, y), its name inside at the top."""
    self.axes.add_patch(
      patches.FancyBboxPatch(
        (x, y),
        w,
        h,
        boxstyle="round,pad=0,rounding_size=0.1",
        facecolor="none",
        edgecolor=COLOURS[kind][1],
        linewidth=1.0,
        linestyle=(0, (1, 2)),
        zorder=1,
      )
    )
    self.text(x + 0.1, y + h - 0.16, text, ha="left", size=size)

  def text(self, x, y, text, *, ha="center", va="center", size=11, **how):
    """Text; white behind it where it crosses a line is up to `bbox`."""
    self.axes.text(x, y, text, ha=ha, va=va, fontsize=size, zorder=5, **how)

  def arrow(self, a, b, text="", *, at=0.5, shift=(0, 0.15), bend=0.0, **how):
    """An arrow from "box.side" to "box.side", sides l, r, t, b.

    Args:
      a: where it starts: a name with a side, or a point.
      b: where it ends.
      text: a label.
      at: where on the straight line the label is.
      shift: of the label, in inches.
      bend: curvature, or "hv" or "vh" for one corner.
      **how: `kind` for a colour, `ha`, `size` for the label, `line`.
    """
    start, end = self._point(a), self._point(b)
    colour = COLOURS[how["kind"]][1] if "kind" in how else "#333333"
    styles = {
      "hv": "angle,angleA=0,angleB=90,rad=0.06",
      "vh": "angle,angleA=90,angleB=0,rad=0.06",
    }
    style = styles.get(bend, f"arc3,rad={bend}")
    self.axes.annotate(
      "",
      end,
      start,
      arrowprops={
        "arrowstyle": "-|>,head_width=0.22,head_length=0.42",
        "connectionstyle": style,
        "color": colour,
        "linewidth": 1.4,
        "linestyle": how.get("line", "-"),
        "shrinkA": 1,
        "shrinkB": 1,
      },
      zorder=2,
    )
    if text:
      x = start[0] + at * (end[0] - start[0]) + shift[0]
      y = start[1] + at * (end[1] - start[1]) + shift[1]
      self.text(
        x, y, text, ha=how.get("ha", "center"), size=how.get("size", 10.5)
      )

  def chain(self, *pairs, **how):
    """Arrows without labels; each of `pairs` is "a.side b.side"."""
    for pair in pairs:
      self.arrow(*pair.split(), **how)

  def _point(self, where):
    if not isinstance(where, str):
      return where
    name, _, side = where.partition(".")
    x, y, w, h = self.places[name]
    moves = {"l": (-w, 0), "r": (w, 0), "t": (0, h), "b": (0, -h), "": (0, 0)}
    return x + moves[side][0], y + moves[side][1]

  def save(self, path):
    """Writes a PNG, the same bytes each time."""
    self.figure.savefig(path, metadata={"Software": None})
    plt.close(self.figure)
