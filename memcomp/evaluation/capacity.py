r"""How many pairs Tensor Cache's memory holds: its Table 3, and beyond it.

  python -m memcomp.evaluation.capacity --out=runs/capacity

No checkpoint: random unit keys and normal values are written into the memory
itself (`memcomp_kernels.tensor_cache`, as it generates: what leaves a window of
one token), and read back.

first: the first pair is read after every further one. Its error is
|k_1 A_n - s v_1| / |s v_1|, s = eta lambda^(n-1) what is left of it; capacity
is the first n where that passes 1. Keys are "random", or "orthogonal": the
first key_dim of them an orthonormal basis, and then random.

all: n pairs are written by each rule, and all of them read. Accuracy is the
share whose own value has the largest cosine with what is read, of the n
values; the error is that of each pair, with its own s, as the root of the mean
square.

Exit codes: 0 done, 2 the input needs a fix.
"""

import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from memcomp import cli, errors
from memcomp import progress as progress_lib
from memcomp.evaluation import panels, report, slices
from memcomp_kernels.tensor_cache import api as tensor_cache

DIMS = (16, 32, 64, 128)
RULES = ("outer", "delta", "wedge")
FIRST = (("orthogonal", 1.0), ("random", 1.0), ("random", 0.995))
"""Keys and decay of Table 3's columns."""
PAIRS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Pairs of "all", over key_dim."""
_ROWS = 25
"""Draws side by side: memories of all tokens would not fit otherwise."""


def written(
  keys: np.ndarray,
  values: np.ndarray,
  queries: np.ndarray,
  *,
  rule: str,
  decay: float,
  reads: int,
) -> np.ndarray:
  """Writes pairs into the memory, one a token, and reads it.

  Args:
    keys: `[rows, pairs, key]`.
    values: `[rows, pairs, value]`.
    queries: `[rows, pairs + reads, key]`, of each token: the query of token t
      reads the memory of the first min(t, pairs) pairs.
    rule: "outer", "delta" or "wedge".
    decay: lambda, in (0, 1].
    reads: tokens after the pairs, which write nothing.

  Returns:
    What is read, `[rows, pairs + reads, value]`, with eta = 1.
  """
  rows, pairs, dim = keys.shape
  spec = tensor_cache.Spec(
    window_size=1,
    rule=rule,
    write_population="evicted",
    read_after_write=True,
  )
  # The pair of token t is written by token t + 1, which evicts it.
  writes = np.arange(pairs + reads) <= pairs
  per_token = np.broadcast_to(
    writes[:, None, None], (rows, pairs + reads, 1, 1)
  ).astype(np.float32)

  def tokens(x):
    x = np.pad(x, ((0, 0), (0, pairs + reads - x.shape[1]), (0, 0)))
    return jnp.asarray(x[:, :, None], jnp.float32)

  inputs = tensor_cache.Inputs(
    query=tokens(queries),
    key=tokens(keys),
    value=tokens(values),
    log_decay=jnp.asarray(math.log(decay) * per_token),
    write_rate=jnp.asarray(per_token),
  )
  value_dim = values.shape[-1]
  state = tensor_cache.init_state(
    spec, batch=rows, heads=1, key_dim=dim, value_dim=value_dim
  )
  _, y = _chunk(state, inputs, spec=spec)
  return np.asarray(y[:, :, 0, value_dim:])


_chunk = jax.jit(tensor_cache.chunk, static_argnames=("spec",))


def draw(
  kind: str, dim: int, pairs: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Draws keys and values of one row, float64 `[pairs, dim]`.

  Args:
    kind: "random" (unit vectors), or "orthogonal" (the first `dim` an
      orthonormal basis, then random).
    dim: of keys and values.
    pairs: rows.
    rng: that draws.
  """
  keys = rng.standard_normal((pairs, dim))
  keys /= np.linalg.norm(keys, axis=1, keepdims=True)
  if kind == "orthogonal":
    basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    keys[:dim] = basis[:pairs]
  return keys, rng.standard_normal((pairs, dim))


def first(
  kind: str, dim: int, decay: float, *, seeds: int, seed: int
) -> dict[str, Any]:
  """Measures capacity by the first pair, see the head of this file.

  Returns:
    `capacities` of each draw, their `mean`, `deviation` and that of the first
    five draws; `never`, the draws that never passed 1 (counted as the most
    pairs written); `errors`, the mean over draws by n, from 1; `theory`.
  """
  pairs = 6 * dim + 32
  found = []
  for keys, values in _batches(kind, dim, pairs, seeds, seed):
    queries = np.repeat(keys[:, :1], pairs + 1, axis=1)
    read = written(keys, values, queries, rule="outer", decay=decay, reads=1)[
      :, 1:
    ]
    left = decay ** np.arange(pairs)[:, None] * values[:, :1]
    error = np.linalg.norm(read - left, axis=2) / np.linalg.norm(left, axis=2)
    found.append(error)
  error = np.concatenate(found)
  over = error > 1
  capacities = np.where(over.any(axis=1), over.argmax(axis=1) + 1, pairs)
  return {
    "capacities": capacities.tolist(),
    "mean": float(capacities.mean()),
    "deviation": float(capacities.std(ddof=1)) if seeds > 1 else 0.0,
    "mean_of_5": float(capacities[:5].mean()),
    "deviation_of_5": float(capacities[:5].std(ddof=1)) if seeds > 1 else 0.0,
    "never": int((~over.any(axis=1)).sum()),
    "errors": [round(float(x), 6) for x in error.mean(axis=0)],
    "theory": theory(kind, dim, decay),
  }


def theory(kind: str, dim: int, decay: float) -> float:
  """Pairs where the expected square of the first one's error is 1."""
  if decay == 1:
    return float(2 * dim if kind == "orthogonal" else dim + 1)
  growth = decay**-2
  return math.log(1 + dim * (growth - 1)) / math.log(growth)


def everything(
  rule: str, dim: int, pairs: int, decay: float, *, seeds: int, seed: int
) -> dict[str, Any]:
  """Writes `pairs` by a rule and reads all, see the head of this file.

  Returns:
    `accuracy` and `error`, and their deviations over draws.
  """
  accuracies, found = [], []
  for keys, values in _batches("random", dim, pairs, seeds, seed):
    # The first read writes the last pair.
    queries = np.concatenate([np.zeros_like(keys), keys], axis=1)
    read = written(keys, values, queries, rule=rule, decay=decay, reads=pairs)
    read = read[:, pairs:].astype(np.float64)
    unit = values / np.linalg.norm(values, axis=2, keepdims=True)
    scores = np.einsum("rid,rjd->rij", read, unit)
    accuracies.append((scores.argmax(axis=2) == np.arange(pairs)).mean(axis=1))
    left = decay ** np.arange(pairs)[::-1, None] * values
    relative = ((read - left) ** 2).sum(axis=2) / (left**2).sum(axis=2)
    found.append(relative.mean(axis=1) ** 0.5)
  accuracy, error = np.concatenate(accuracies), np.concatenate(found)
  return {
    "accuracy": float(accuracy.mean()),
    "accuracy_deviation": float(accuracy.std()),
    "error": float(error.mean()),
    "error_deviation": float(error.std()),
  }


def run(
  out: pathlib.Path,
  *,
  dims: Sequence[int] = DIMS,
  seeds: int = 200,
  seed: int = 0,
) -> list[pathlib.Path | str]:
  """Measures all slices; prints, and writes JSON, PNG and a table's lines.

  Args:
    out: folder for results; slices that stand there already are not run again.
    dims: of keys and values.
    seeds: draws of each slice.
    seed: of the draws.

  Returns:
    What was written.

  Raises:
    UserError: a bad value, or a folder that cannot be written.
  """
  if not dims or min(dims) < 8:
    raise errors.UserError(f"--dims={','.join(map(str, dims))}: give 8 or more")
  if seeds < 1 or seed < 0:
    raise errors.UserError(f"--seeds={seeds} --seed={seed}: give 1, 0 or more")
  folder = report.make_folder(out)
  file = slices.File(
    folder / "capacity.json",
    "capacity",
    about={"versions": report.versions()},
    model="the memory alone",
  )
  tasks = list(_tasks(dims, seeds))
  progress = progress_lib.Progress("writing and reading, slices", len(tasks))
  found = []
  for task in tasks:
    key = task | {"task_hash": report.task_hash(**task), "seed": seed}
    one = file.find(task_hash=key["task_hash"], seed=seed)
    if one is None:
      start = time.perf_counter()
      one = key | _measure(task, seed)
      one["seconds"] = round(time.perf_counter() - start, 2)
      file.add(
        one,
        setting=f"{_setting(task)}, {seeds} draws, seed {seed}",
        result=_result(one),
        state_bytes=4 * task["dim"] ** 2,
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
  """Returns both measurements as tables in markdown."""
  lines = [
    "| key_dim | keys | decay | capacity | of 5 draws | expected |",
    "|---|---|---|---|---|---|",
  ]
  for one in found:
    if one["measure"] == "first":
      lines.append(
        f"| {one['dim']} | {one['keys']} | {one['decay']:g}"
        f" | {one['mean']:.1f} ± {one['deviation']:.1f}"
        f" | {one['mean_of_5']:.1f} ± {one['deviation_of_5']:.1f}"
        f" | {one['theory']:.1f} |"
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


def _tasks(dims: Sequence[int], seeds: int) -> Iterator[dict[str, Any]]:
  for dim in dims:
    for kind, decay in FIRST:
      yield {
        "measure": "first",
        "dim": dim,
        "keys": kind,
        "rule": "outer",
        "decay": decay,
        "draws": seeds,
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
            "draws": seeds,
          }


def _measure(task: dict[str, Any], seed: int) -> dict[str, Any]:
  seeds, dim, decay = task["draws"], task["dim"], task["decay"]
  if task["measure"] == "first":
    return first(task["keys"], dim, decay, seeds=seeds, seed=seed)
  return everything(
    task["rule"], dim, task["pairs"], decay, seeds=seeds, seed=seed
  )


def _batches(kind, dim, pairs, seeds, seed):
  """Draws `seeds` rows, some at a time; row i is of (seed, i) alone."""
  for start in range(0, seeds, _ROWS):
    rows = [
      draw(kind, dim, pairs, np.random.default_rng((seed, i)))
      for i in range(start, min(start + _ROWS, seeds))
    ]
    yield tuple(np.stack(x) for x in zip(*rows, strict=True))


def _setting(task: dict[str, Any]) -> str:
  what = f"{task['measure']}, key_dim {task['dim']}, {task['keys']} keys"
  many = f", {task['pairs']} pairs" if "pairs" in task else ""
  return f"{what}, {task['rule']}, decay {task['decay']:g}{many}"


def _result(one: dict[str, Any]) -> str:
  if one["measure"] == "first":
    return f"capacity {one['mean']:.1f} +- {one['deviation']:.1f}"
  return f"accuracy {one['accuracy']:.4f}, error {one['error']:.3f}"


def _draw(
  found: list[dict[str, Any]], path: pathlib.Path
) -> pathlib.Path | str:
  """The largest memory: by pairs over key_dim, each rule a line."""
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


_OUT = flags.DEFINE_string("out", "runs/capacity", "Folder for results.")
_DIMS = flags.DEFINE_list("dims", [str(d) for d in DIMS], "Sizes of keys.")
_SEEDS = flags.DEFINE_integer("seeds", 200, "Draws of each slice.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def program() -> None:
  """Measures what the flags describe."""
  if not all(dim.isdecimal() for dim in _DIMS.value):
    raise errors.UserError(
      f"--dims={','.join(_DIMS.value)}: give whole numbers"
    )
  written_to = run(
    pathlib.Path(_OUT.value),
    dims=[int(dim) for dim in _DIMS.value],
    seeds=_SEEDS.value,
    seed=_SEED.value,
  )
  print("\nwritten:")
  for path in written_to:
    print(f"  {path if isinstance(path, str) else report.shown(path)}")


if __name__ == "__main__":
  cli.main(program, usage=__doc__)
