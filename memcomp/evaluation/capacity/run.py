"""The number of pairs that Tensor Cache's memory stores: its Table 3, and more.

There is no checkpoint. Random unit keys and normal values are written directly
into the memory (`memcomp_kernels.tensor_cache` as in generation, with a window
of one token), and read back.

"first" reads the first pair after every further one. Its error is |k_1 A_n - s
v_1| / |s v_1|, where s = eta lambda^(n-1) is its remaining weight. The capacity
is the first n where the error exceeds 1. Keys are "random", or "orthogonal": an
orthonormal basis of key_dim keys, then random ones.

"all" writes n pairs by each rule and reads all of them. A read is right if, of
the n values, its own value has the largest cosine with it; accuracy is the
share of right reads. The error is the root mean square over pairs, each with
its own s.
"""

import functools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from memcomp import limits, platforms
from memcomp import progress as progress_lib
from memcomp.evaluation import panels, report, slices
from memcomp.evaluation.capacity import measure

DIMS = (16, 32, 64, 128)
RULES = ("outer", "delta", "wedge")
FIRST = (("orthogonal", 1.0), ("random", 1.0), ("random", 0.995))
"""Keys and decay of Table 3's columns."""
PAIRS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Numbers of pairs for "all", over key_dim."""


def run(
  out: pathlib.Path,
  *,
  dims: Sequence[int | str] = DIMS,
  samples: int = 200,
  seed: int = 0,
) -> list[pathlib.Path | str]:
  """Measures all slices; prints and writes JSON, PNG and table lines.

  Args:
    out: folder for results; slices with results there are skipped.
    dims: dimensions of keys and values.
    samples: draws per slice.
    seed: seed of the draws.

  Returns:
    Paths of the results, or lines about them.

  Raises:
    UserError: a bad value, or a folder that cannot be written.
  """
  sizes = sorted(set(limits.whole_numbers("--dims", dims or [""], 8)))
  limits.check("--samples", samples, 1, limits.SIDE_BY_SIDE)
  limits.check_seed("--seed", seed)
  folder = report.make_folder(out)
  file = slices.File(
    folder / "capacity.json",
    "capacity",
    about={"versions": platforms.versions()},
    model="the memory alone",
  )
  tasks = list(_tasks(sizes, samples))
  progress = progress_lib.Progress("writing and reading, slices", len(tasks))
  found = []
  for task in tasks:
    key = task | {"task_hash": report.task_hash(**task), "seed": seed}
    one, _ = file.find_or_measure(
      key,
      functools.partial(_measured, task, seed),
      setting=f"{_setting(task)}, {samples} draws, seed {seed}",
      result=_result,
    )
    found.append(one)
    progress.advance()
  print(table(found))
  return [
    file.path,
    folder / "results.md",
    _draw(found, folder / "capacity.png"),
  ]


def table(found: list[dict[str, Any]]) -> str:
  """Returns both measurements as Markdown tables."""
  draws = report.counted(min(5, found[0]["draws"]), "draw")
  lines = [
    f"| key_dim | keys | decay | capacity | of {draws} | expected |",
    "|---|---|---|---|---|---|",
  ]
  for one in found:
    if one["measure"] == "first":
      lines.append(
        f"| {one['dim']} | {one['keys']} | {one['decay']:g}"
        f" | {_mean(one, '±')} | {_mean(one, '±', '_of_5')}"
        f" | {measure.theory(one['keys'], one['dim'], one['decay']):.1f} |"
      )
  lines += [
    "",
    "| key_dim | rule | decay | "
    + " | ".join(f"n = {x:g} key_dim" for x in PAIRS)
    + " |",
    "|---" * (3 + len(PAIRS)) + "|",
  ]
  of_rules: dict[tuple, list[str]] = {}
  for one in found:
    if one["measure"] == "all":
      cells = of_rules.setdefault((one["dim"], one["rule"], one["decay"]), [])
      cells.append(f"{one['accuracy']:.3f} ({one['error']:.2f})")
  for (dim, rule, decay), cells in of_rules.items():
    lines.append(f"| {dim} | {rule} | {decay:g} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _tasks(dims: Sequence[int], samples: int) -> Iterator[dict[str, Any]]:
  for dim in dims:
    for kind, decay in FIRST:
      yield {
        "measure": "first",
        "dim": dim,
        "keys": kind,
        "rule": "outer",
        "decay": decay,
        "draws": samples,
      }
  for dim in dims:
    for rule in RULES:
      for decay in (1.0, 0.995):
        for share in PAIRS:
          yield {
            "measure": "all",
            "dim": dim,
            "keys": "random",
            "rule": rule,
            "decay": decay,
            "pairs": max(1, round(share * dim)),
            "draws": samples,
          }


def _measured(task: dict[str, Any], seed: int) -> dict[str, Any]:
  seeds, dim, decay = task["draws"], task["dim"], task["decay"]
  start = time.perf_counter()
  if task["measure"] == "first":
    found = measure.first(task["keys"], dim, decay, seeds=seeds, seed=seed)
  else:
    found = measure.everything(
      task["rule"], dim, task["pairs"], decay, seeds=seeds, seed=seed
    )
  seconds = round(time.perf_counter() - start, 2)
  return found | {"seconds": seconds, "state_bytes": 4 * dim**2}


def _setting(task: dict[str, Any]) -> str:
  what = f"{task['measure']}, key_dim {task['dim']}, {task['keys']} keys"
  many = f", {task['pairs']} pairs" if "pairs" in task else ""
  return f"{what}, {task['rule']}, decay {task['decay']:g}{many}"


def _result(one: dict[str, Any]) -> str:
  if one["measure"] == "first":
    return f"capacity {_mean(one, '+-')}"
  return f"accuracy {one['accuracy']:.4f}, error {one['error']:.3f}"


def _mean(one: dict[str, Any], sign: str, of: str = "") -> str:
  """Returns a mean and its deviation, which a single draw lacks."""
  mean, deviation = one[f"mean{of}"], one[f"deviation{of}"]
  return f"{mean:.1f}" + (
    "" if deviation is None else f" {sign} {deviation:.1f}"
  )


def _draw(
  found: list[dict[str, Any]], path: pathlib.Path
) -> pathlib.Path | str:
  """Draws the largest memory: by pairs over key_dim, one line per rule."""
  largest = max(one["dim"] for one in found)
  by_rule: dict[str, dict[str, list[float]]] = {"accuracy": {}, "error": {}}
  for one in found:
    if one["measure"] == "all" and one["dim"] == largest:
      name = f"{one['rule']}, decay {one['decay']:g}"
      for key, lines in by_rule.items():
        lines.setdefault(name, []).append(one[key])
  return panels.draw(
    PAIRS,
    [
      panels.Panel("pairs found again", by_rule["accuracy"], (-0.03, 1.03)),
      panels.Panel("relative error", by_rule["error"], log=True),
    ],
    xlabel=f"pairs written / key_dim (key_dim {largest})",
    title="Tensor Cache's memory: what is read of n pairs",
    path=path,
  )
