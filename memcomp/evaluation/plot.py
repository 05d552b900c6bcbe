"""perplexity.png: bits per byte against the position in the text."""

import math
import pathlib
from typing import Any

from memcomp.training import disk


def by_position(
  streamed: dict[str, Any],
  whole: dict[str, Any],
  title: str,
  path: pathlib.Path,
) -> pathlib.Path | str:
  """Draws what `perplexity.streamed` found.

  Args:
    streamed: its result.
    whole: of `perplexity.whole_text`.
    title: of the figure.
    path: of the PNG.

  Returns:
    `path`, or a line that says why there is no figure.
  """
  try:
    from matplotlib import figure
  except ImportError:
    return (
      f"no {path.name}: matplotlib is not installed (pip install "
      "'memcomp[plot]')"
    )
  buckets = streamed["buckets"]
  # A figure without pyplot: no backend to choose, no window, no global state.
  canvas = figure.Figure(figsize=(7.5, 5), layout="constrained")
  axes = canvas.subplots()
  axes.set_xscale("log", base=2)
  # A log axis has no 0: the first bucket is drawn an octave wide, as the rest.
  edges = [b["first"] or (b["last"] + 1) / 2 for b in buckets]
  ends = [b["last"] + 1 for b in buckets]
  centres = [(a * b) ** 0.5 for a, b in zip(edges, ends, strict=True)]
  axes.errorbar(
    centres,
    _values(buckets, "bits_per_byte"),
    # Spans differ far more in difficulty than positions do: bars tell how sure
    # the mean is, the table has the deviation itself.
    yerr=[
      std / streamed["rows"] ** 0.5 for std in _values(buckets, "std_over_rows")
    ],
    marker="o",
    capsize=3,
    label="state handed on (bars: standard error over spans)",
  )
  window = streamed["window"]
  axes.plot(
    centres,
    _values(buckets, "fresh_bits_per_byte"),
    marker="s",
    markersize=4,
    linestyle="--",
    color="0.5",
    label=f"same tokens, fresh state every {window:,}",
  )
  if whole["bits_per_byte"] is not None:
    axes.axhline(
      whole["bits_per_byte"],
      linestyle=":",
      color="0.5",
      label=f"whole text, windows of {window:,}: {whole['bits_per_byte']:.3f}",
    )
  axes.axvline(window, color="tab:red", linewidth=1)
  axes.annotate(
    f"trained length {window:,}",
    (window, 0),
    xycoords=("data", "axes fraction"),
    xytext=(4, 4),
    textcoords="offset points",
    color="tab:red",
    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
  )
  ticks = [*edges, *ends[-1:]]
  axes.set_xticks(ticks, ["0", *(f"{t:,}" for t in ticks[1:])])
  axes.minorticks_off()
  axes.set(
    xlabel="position in the text (tokens, log scale)",
    ylabel="bits per byte (lower is better)",
    title=title,
  )
  axes.grid(alpha=0.3)
  # Below the axes, where no curve can run into it.
  canvas.legend(loc="outside lower center", fontsize="small")
  with disk.clear_errors(f"cannot write {path}"):
    canvas.savefig(path, dpi=120)
  return path


def _values(buckets: list[dict[str, Any]], name: str) -> list[float]:
  """Returns a column; nothing is drawn where it is None."""
  return [math.nan if b[name] is None else b[name] for b in buckets]
