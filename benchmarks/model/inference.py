"""Inference by context: every mixer in the comparison's small model.

  python benchmarks/model/inference.py --runs=inference.jsonl

Time of a token, speed of reading (medians over turns) and bytes of state behind
contexts of 1k to 128k tokens of random ids, one text, weights of the start.
Each finished model is a line of <runs>; models that are there are not repeated.
Prints a table of all lines; `--report` does only that.
"""

import json
import pathlib
from typing import Any

import jax
from absl import app, flags
from flax import nnx

from memcomp import progress as progress_lib
from memcomp.evaluation import throughput
from memcomp.models import comparison, decoder

_MIXERS = flags.DEFINE_list("mixers", list(comparison.NAMES), "Which of them.")
_CONTEXTS = flags.DEFINE_list(
  "contexts", [str(x) for x in throughput.CONTEXTS], "Tokens, of each."
)
_TOKENS = flags.DEFINE_integer("tokens", 128, "Made at each context.")
_ROUNDS = flags.DEFINE_integer("rounds", 45, "Turns of each context.")
_RUNS = flags.DEFINE_string("runs", "inference.jsonl", "Finished models.")
_REPORT = flags.DEFINE_bool("report", False, "Only report on what is there.")


def build(name: str) -> decoder.Decoder:
  """The small model called `name`, with the weights of the start."""
  config = comparison.language_model(name)

  def new():
    return decoder.Decoder(config, rngs=nnx.Rngs(0))

  graph = nnx.split(nnx.eval_shape(new))[0]
  return nnx.merge(graph, jax.jit(lambda: nnx.split(new())[1])())


def finished() -> dict[str, list[dict[str, Any]]]:
  """Rows of every model that is done, by name."""
  path = pathlib.Path(_RUNS.value)
  lines = path.read_text().splitlines() if path.exists() else []
  return {run["name"]: run["rows"] for run in map(json.loads, lines)}


def spread(rows: list[dict[str, Any]]) -> float:
  """The slowest context's time of a token over the fastest's."""
  times = [row["seconds_per_token"] for row in rows]
  return max(times) / min(times)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
  """A row for each model."""
  lines = [
    "| model | contexts | KiB of state | ms a token | longest / shortest |"
    " slowest / fastest | tokens/s read |",
    "|---|---|---:|---:|---:|---:|---:|",
  ]

  def ends(rows, key, scale, form):
    first, last = (
      format(scale * row[key], form) for row in (rows[0], rows[-1])
    )
    return first if first == last else f"{first} - {last}"

  for name, rows in runs.items():
    cells = (
      name,
      f"{rows[0]['context']:,} - {rows[-1]['context']:,}",
      ends(rows, "state_bytes", 1 / 1024, ",.0f"),
      ends(rows, "seconds_per_token", 1e3, ".3f"),
      f"{rows[-1]['seconds_per_token'] / rows[0]['seconds_per_token']:.2f}",
      f"{spread(rows):.2f}",
      ends(rows, "read_tokens_per_second", 1, ",.0f"),
    )
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def main(_) -> None:
  """Measures what is missing, and reports."""
  done = finished()
  contexts = [int(x) for x in _CONTEXTS.value]
  for name in [] if _REPORT.value else _MIXERS.value:
    if name in done:
      continue
    turns = len(contexts) * (1 + _ROUNDS.value)
    rows = throughput.measure(
      build(name),
      contexts=contexts,
      tokens=_TOKENS.value,
      rounds=_ROUNDS.value,
      progress=progress_lib.Progress(name, turns).advance,
    )
    with pathlib.Path(_RUNS.value).open("a") as file:
      file.write(json.dumps({"name": name, "rows": rows}) + "\n")
    print(f"{name}: slowest / fastest {spread(rows):.3f}", flush=True)
  runs = finished()
  order = [name for name in comparison.NAMES if name in runs]
  runs = {name: runs[name] for name in order}
  print(table(runs))


if __name__ == "__main__":
  app.run(main)
