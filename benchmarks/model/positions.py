"""Draws bits per byte by position of several evaluated runs in one figure.

  python benchmarks/model/positions.py --out=positions.png \
    runs/quickstart runs/long_context

Solid: the state handed on from window to window. Dashed: the same tokens with
a fresh state every window. Bars: standard error over the spans.
"""

import json
import pathlib

from absl import app, flags
from matplotlib import figure

_OUT = flags.DEFINE_string("out", "positions.png", "The PNG to write.")


def main(argv):
  """Reads eval/results.json of each run and draws."""
  if len(argv) < 2:
    raise app.UsageError("name at least one evaluated run")
  canvas = figure.Figure(figsize=(7, 4), layout="constrained")
  axes = canvas.subplots()
  for i, run in enumerate(argv[1:]):
    result = json.loads((pathlib.Path(run) / "eval/results.json").read_text())
    streamed = result["perplexity"]["streamed"]
    buckets = streamed["buckets"]
    names = [f"{b['first']:,}-{b['last']:,}" for b in buckets]
    label = f"{result['name']}, seed {result['seed']}"
    axes.errorbar(
      names,
      [b["bits_per_byte"] for b in buckets],
      [b["std_over_rows"] / streamed["rows"] ** 0.5 for b in buckets],
      color=f"C{i}",
      marker="o",
      capsize=3,
      label=f"{label}: state handed on",
    )
    axes.plot(
      names,
      [b["fresh_bits_per_byte"] for b in buckets],
      color=f"C{i}",
      linestyle="--",
      marker="s",
      markersize=4,
      label=f"{label}: fresh every {streamed['window']}",
    )
  axes.set(
    xlabel="position in the text (bytes; trained on windows of 256)",
    ylabel="bits per byte (lower is better)",
  )
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small")
  canvas.savefig(_OUT.value, dpi=110)
  print(f"written: {_OUT.value}")


if __name__ == "__main__":
  app.run(main)
