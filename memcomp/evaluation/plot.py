"""Figures of results: bits per byte by position, and models side by side."""

import math
import pathlib
from typing import Any

from memcomp import figures


def by_position(
  streamed: dict[str, Any],
  whole: dict[str, Any],
  title: str,
  path: pathlib.Path,
) -> pathlib.Path | str:
  """Draws the result of `perplexity.streamed`.

  Args:
    streamed: result of `perplexity.streamed`.
    whole: result of `perplexity.whole_text`.
    title: title of the figure.
    path: path of the PNG.

  Returns:
    `path`, or a line that explains why there is no figure.
  """
  canvas = figures.new_canvas(7.5, 6)
  if canvas is None:
    return figures.MISSING.format(path.name)
  buckets, window = streamed["buckets"], streamed["window"]
  bits, gain = canvas.subplots(2, 1, sharex=True, height_ratios=[2, 1])
  bits.set_xscale("log", base=2)
  # A log axis has no 0, so the first bucket is an octave wide like the others.
  edges = [b["first"] or (b["last"] + 1) / 2 for b in buckets]
  ends = [b["last"] + 1 for b in buckets]
  centres = [(a * b) ** 0.5 for a, b in zip(edges, ends, strict=True)]
  carried = _values(buckets, "bits_per_byte")
  fresh = _values(buckets, "fresh_bits_per_byte")
  bits.plot(centres, carried, marker="o", label="state carried")
  bits.plot(
    centres,
    fresh,
    marker="s",
    markersize=4,
    linestyle="--",
    color="0.5",
    label=f"same tokens, fresh state every {window:,}",
  )
  if whole["bits_per_byte"] is not None:
    bits.axhline(
      whole["bits_per_byte"],
      linestyle=":",
      color="0.5",
      label=f"whole text, windows of {window:,}: {whole['bits_per_byte']:.3f}",
    )
  # Spans differ far more than what the state saves in each of them. So bars are
  # at the difference, where they say whether it is more than chance.
  gain.errorbar(
    centres,
    [b - a for a, b in zip(carried, fresh, strict=True)],
    yerr=_values(buckets, "gain_error"),
    marker="o",
    capsize=3,
  )
  gain.axhline(0, color="0.5", linestyle="--")
  for axes in (bits, gain):
    axes.axvline(window, color="tab:red", linewidth=1)
    axes.grid(alpha=0.3)
  bits.annotate(
    f"trained length {window:,}",
    (window, 0),
    xycoords=("data", "axes fraction"),
    xytext=(4, 4),
    textcoords="offset points",
    color="tab:red",
    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
  )
  ticks = [*edges, *ends[-1:]]
  gain.set_xticks(ticks, ["0", *(f"{t:,}" for t in ticks[1:])])
  gain.minorticks_off()
  bits.set(ylabel="bits per byte (lower is better)", title=title)
  gain.set(
    xlabel="position in the text (tokens, log scale)",
    ylabel="saved by the state",
  )
  if streamed["rows"] > 1:
    gain.set_title("bars: standard error over spans", fontsize="small")
  # Below the axes, where no curve can run into it.
  canvas.legend(loc="outside lower center", fontsize="small", ncols=2)
  return figures.save(canvas, path)


def side_by_side(
  found: dict[str, Any], path: pathlib.Path
) -> pathlib.Path | str:
  """Draws the result of `compare.compare`: bits, state and speed by model.

  Args:
    found: result of `compare.compare`.
    path: path of the PNG.

  Returns:
    `path`, or a line that explains why there is no figure.
  """
  rows = found["rows"][::-1]  # the best on top
  canvas = figures.new_canvas(10, 1.9 + 0.26 * len(rows))
  if canvas is None:
    return figures.MISSING.format(path.name)
  places = range(len(rows))
  bits, state, speed = canvas.subplots(
    1, 3, sharey=True, width_ratios=[2.2, 1, 1]
  )
  window, end = found["task"]["window"], found["task"]["streamed_to"]
  for key, marker, label in (
    ("bits_per_byte", "o", f"fresh windows of {window:,}"),
    ("late_bits_per_byte", "|", f"state carried, up to token {end:,}"),
  ):
    bits.errorbar(
      _values(rows, key),
      places,
      xerr=[0 if s != s else s for s in _values(rows, f"{key}_std")],
      fmt=marker,
      label=label,
    )
  state.plot(_values(rows, "state_bytes"), places, "o", color="0.4")
  speed.plot(_values(rows, "tokens_per_second"), places, "o", color="0.4")
  bits.set_yticks(places, [row["name"] for row in rows])
  bits.set(
    xlabel="bits per byte (lower is better; bars: std over seeds)",
    title=f"{found['task']['trained_tokens']:,} tokens of training",
  )
  state.set(xlabel="state, bytes a sequence", xscale="log")
  speed.set(xlabel="training, tokens/s")
  speed.set_xlim(left=0)
  for axes in (bits, state, speed):
    axes.grid(alpha=0.3)
  # Below the axes, where it hides no point.
  canvas.legend(loc="outside lower center", fontsize="small", ncols=2)
  return figures.save(canvas, path)


def by_context(
  rows: list[dict[str, Any]], title: str, path: pathlib.Path
) -> pathlib.Path | str:
  """Draws the result of `throughput.measure`.

  Args:
    rows: result of `throughput.measure`.
    title: title of the figure.
    path: path of the PNG.

  Returns:
    `path`, or a line that explains why there is no figure.
  """
  canvas = figures.new_canvas(11, 4)
  if canvas is None:
    return figures.MISSING.format(path.name)
  contexts = _values(rows, "context")
  for axes, key, scale, label in zip(
    canvas.subplots(1, 3),
    ("seconds_per_token", "read_tokens_per_second", "state_bytes"),
    (1e3, 1, 2**-10),
    ("milliseconds to make a token", "tokens/s read", "KiB of state a text"),
    strict=True,
  ):
    axes.plot(contexts, [scale * x for x in _values(rows, key)], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="context (tokens)", title=label)
    axes.grid(alpha=0.3)
  canvas.suptitle(title)
  return figures.save(canvas, path)


_SCORES = {
  "loose": "holds the value (loose)",
  "strict": "begins with it (strict)",
}


def needles(
  slices: list[dict[str, Any]], title: str, path: pathlib.Path
) -> pathlib.Path | str:
  """Draws the results of `niah.measure` by length, and by depth and length.

  Args:
    slices: results of `niah.measure` with their tasks.
    title: title of the figure.
    path: path of the PNG.

  Returns:
    `path`, or a line that explains why there is no figure.
  """
  names = list(dict.fromkeys(one["task"] for one in slices))
  canvas = figures.new_canvas(6 + 3 * len(names), 4.5)
  if canvas is None:
    return figures.MISSING.format(path.name)
  axes, *maps = canvas.subplots(
    1, 1 + len(names), width_ratios=[2, *[1] * len(names)]
  )
  depths, image = 10, None
  for color, (name, by_depth) in enumerate(zip(names, maps, strict=True)):
    own = [one for one in slices if one["task"] == name]
    lengths = [one["context"] for one in own]
    for key, style in zip(_SCORES, ("-o", "--s"), strict=True):
      axes.plot(
        lengths,
        [one[key] for one in own],
        style,
        color=f"C{color}",
        label=f"{name}: {_SCORES[key]}",
        markersize=4,
      )
    image = by_depth.imshow(
      [
        [_share(one, d / depths, (d + 1) / depths) for one in own]
        for d in range(depths)
      ],
      aspect="auto",
      cmap="RdYlGn",
      vmin=0,
      vmax=100,
      extent=(-0.5, len(own) - 0.5, 100, 0),
    )
    by_depth.set_xticks(
      range(len(own)), [f"{n:,}" for n in lengths], rotation=45
    )
    by_depth.set(title=name, xlabel="tokens")
    if not color:
      by_depth.set_ylabel("depth of the needle, %")
  canvas.colorbar(image, ax=maps, label="answers that hold the value, %")
  axes.set_xscale("log", base=2)
  lengths = sorted({one["context"] for one in slices})
  axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
  axes.minorticks_off()
  axes.set(
    xlabel="tokens of question and answer (log scale)",
    ylabel="answers, %",
    ylim=(-3, 103),
  )
  axes.grid(alpha=0.3)
  canvas.suptitle(title)
  canvas.legend(loc="outside lower left", fontsize="small", ncols=3)
  return figures.save(canvas, path)


def _share(one: dict[str, Any], low: float, high: float) -> float:
  """Percent of needles found at depths in [low, high); the last includes 1."""
  found = [
    hit
    for hit, depth in zip(one["found"], one["depth"], strict=True)
    if low <= min(depth, 1 - 1e-9) < high
  ]
  return 100 * sum(found) / len(found) if found else math.nan


def _values(buckets: list[dict[str, Any]], name: str) -> list[float]:
  """Returns a column; None becomes nan, which is not drawn."""
  return [math.nan if b[name] is None else b[name] for b in buckets]
