"""Compares finished runs: bits per byte, size of the state, speed.

The bits come from the end of each run. Speed is measured here, in turns over
all models, because speeds of separate runs are not comparable.
"""

import math
import pathlib
import statistics
from typing import Any

from memcomp import config as config_lib
from memcomp import errors, paths
from memcomp import progress as progress_lib
from memcomp.evaluation import plot, report
from memcomp.runs import workdir as workdir_lib
from memcomp.training import compare_tasks, speed

PARAMETERS_TOLERANCE = 0.02
"""Larger differences of parameter counts get a note."""

_SAME = ("data", "optimizer", "training", "evaluation")


def run(checkpoint: str | pathlib.Path | None, out: str = "") -> None:
  """Writes and prints a table and a figure of the runs in a folder.

  Args:
    checkpoint: the folder, as `train.py --each` leaves it.
    out: folder for results; "" is the runs' folder.

  Raises:
    UserError: no folder is given, or see `compare`.
  """
  if not checkpoint:
    raise errors.UserError("--checkpoint is missing; give it, or see --help")
  paths.check_local("out", out)
  runs = pathlib.Path(checkpoint)
  folder = report.make_folder(pathlib.Path(out)) if out else runs
  of_tasks = compare_tasks.compare(runs)
  found = of_tasks or compare(runs)
  text = compare_tasks.table(found) if of_tasks else table(found)
  print(text, *found.get("notes", ()), sep="\n")
  report.write_json(folder / "compare.json", found)
  report.write_text(folder / "compare.md", text)
  draw = compare_tasks.draw if of_tasks else plot.side_by_side
  report.announce(
    [
      folder / "compare.json",
      folder / "compare.md",
      draw(found, folder / "compare.png"),
    ]
  )


def compare(folder: pathlib.Path, rounds: int = 5) -> dict[str, Any]:
  """Reads the runs in a folder and measures their speed.

  Args:
    folder: the folder, as `train.py --each` leaves it.
    rounds: number of timings of each model's training step.

  Returns:
    `rows`, best first (see `summary`); `task` (text, windows, training tokens);
    `notes`, lines for the reader.

  Raises:
    UserError: no finished runs, or runs that are not comparable.
  """
  runs = read(folder)
  first = runs[0]
  for run in runs[1:]:
    _check_same(first, run)
  by_name: dict[str, list[dict[str, Any]]] = {}
  for run in runs:
    by_name.setdefault(run["name"], []).append(run)
  for group in by_name.values():
    compare_tasks.check_seeds(group, ("model",))
  configs = {
    name: workdir_lib.config_of(group[0]["config"], f"{name} in {folder}")
    for name, group in by_name.items()
  }
  progress = progress_lib.Progress("timing", len(configs) * (rounds + 1))
  rates = speed.training(configs, rounds=rounds, progress=progress.advance)
  rows = [summary(name, group, rates[name]) for name, group in by_name.items()]
  rows.sort(key=lambda row: row["bits_per_byte"] or math.inf)
  training, data = first["config"]["training"], first["config"]["data"]
  tokens_a_step = training["batch_size"] * data["sequence_length"]
  return {
    "rows": rows,
    "task": {
      "text": first["perplexity"]["text"],
      "task_hash": first["perplexity"]["task_hash"],
      "window": data["sequence_length"],
      "streamed_to": first["perplexity"]["streamed"]["positions"],
      "trained_tokens": training["steps"] * tokens_a_step,
    },
    "notes": notes(rows),
  }


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the results of the finished runs in `folder`, by name and seed.

  Raises:
    UserError: there are none, or two of one name and seed.
  """
  found: list[dict[str, Any]] = []
  places: compare_tasks.Folders = {}
  for path in sorted(folder.glob("*/eval/results.json")):
    result = paths.read_json(path, "evaluate the run again")
    if "perplexity" in result:
      with errors.malformed(f"{path}", "evaluate the run again"):
        config = workdir_lib.config_of(result["config"], str(path.parent))
        if config.data.format == "messages":
          raise errors.UserError(
            f"{path} is of a run on conversations, which are not compared;"
            " score its answers with --task=perplexity"
          )
        for count in ("seed", "parameters", "state_bytes"):
          result[count] = int(result[count])
        summary(result["name"], [result], 0.0)
        int(result["perplexity"]["streamed"]["positions"])
        _ = result["perplexity"]["text"], result["perplexity"]["task_hash"]
        result["config"] = config_lib.to_dict(config)
        compare_tasks.check_new(result, path.parent.parent, places)
      found.append(result)
  if not found:
    raise errors.UserError(
      f"{folder} holds no finished runs; give the folder that train.py --each "
      "wrote"
    )
  return sorted(found, key=lambda result: (result["name"], result["seed"]))


def summary(
  name: str, runs: list[dict[str, Any]], tokens_per_second: float
) -> dict[str, Any]:
  """Returns one row: the runs of a model with different seeds.

  Returns:
    `name`, `seeds`, `parameters`, `state_bytes`; `bits_per_byte` and
    `bits_per_byte_std` (over seeds; None for one) in windows of the trained
    length; `late_bits_per_byte` and its `_std` over the last positions of the
    streamed spans; `tokens_per_second`. Bits are None if a seed's are not
    finite.
  """
  whole = [r["perplexity"]["trained_length"]["bits_per_byte"] for r in runs]
  late = [
    r["perplexity"]["streamed"]["buckets"][-1]["bits_per_byte"] for r in runs
  ]
  row = {
    "name": name.removeprefix("compare-"),
    "seeds": [run["seed"] for run in runs],
    "parameters": runs[0]["parameters"],
    "state_bytes": runs[0]["state_bytes"],
    "tokens_per_second": tokens_per_second,
  }
  for key, values in (("bits_per_byte", whole), ("late_bits_per_byte", late)):
    finite = all(v is not None for v in values)
    row[key] = statistics.mean(values) if finite else None
    several = finite and len(values) > 1
    row[f"{key}_std"] = statistics.stdev(values) if several else None
  return row


def notes(rows: list[dict[str, Any]]) -> list[str]:
  """Returns warnings about rows that are not fully comparable."""
  said = []
  counts = [row["parameters"] for row in rows]
  if max(counts) > (1 + PARAMETERS_TOLERANCE) * min(counts):
    said.append(
      f"parameters differ by more than {PARAMETERS_TOLERANCE:.0%}:"
      f" {min(counts):,} to {max(counts):,}"
    )
  most = max(len(row["seeds"]) for row in rows)
  for row in rows:
    if len(row["seeds"]) < most:
      said.append(f"{row['name']} has {len(row['seeds'])} of {most} seeds")
  return said


def table(found: dict[str, Any]) -> str:
  """Returns the rows as a Markdown table."""
  window, end = found["task"]["window"], found["task"]["streamed_to"]
  heads = [
    "model",
    f"bits per byte at {window:,}",
    f"up to {end:,}",
    "state, bytes",
    "tokens/s",
    "parameters",
  ]
  lines = [" | ".join(["", *heads, ""]).strip()]
  lines.append("|---|" + "---:|" * (len(heads) - 1))
  for row in found["rows"]:
    cells = [
      row["name"],
      _with_std(row, "bits_per_byte"),
      _with_std(row, "late_bits_per_byte"),
      f"{row['state_bytes']:,}",
      f"{row['tokens_per_second']:,.0f}",
      f"{row['parameters']:,}",
    ]
    lines.append(" | ".join(["", *cells, ""]).strip())
  return "\n".join(lines) + "\n"


def _with_std(row: dict[str, Any], key: str) -> str:
  text = report.number(row[key])
  std = row[f"{key}_std"]
  return text if std is None else f"{text} ± {std:.3f}"


def _check_same(first: dict[str, Any], other: dict[str, Any]) -> None:
  """Checks that two runs had equal data, training and evaluation."""
  here = f"{first['name']} (seed {first['seed']})"
  there = f"{other['name']} (seed {other['seed']})"
  changed = [
    line
    for part in _SAME
    for line in workdir_lib.differences(
      first["config"][part], other["config"][part], part
    )
    if part == "evaluation" or not workdir_lib.is_free(line.split(" ", 1)[0])
  ]
  if first["perplexity"]["task_hash"] != other["perplexity"]["task_hash"]:
    changed.append("the text that they were evaluated on")
  if changed:
    raise errors.UserError(
      f"{here} and {there} are not comparable: {'; '.join(changed)}; compare "
      "runs of one config file"
    )
