"""lm-evaluation-harness on a checkpoint; needs the extra `eval`.

Each task or group of tasks is a slice. Data come from the user's cache or from
local tasks; downloads need permission.
"""

import atexit
import contextlib
import difflib
import importlib.metadata
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from memcomp import errors, figures, limits, paths
from memcomp.evaluation import load, perplexity, report, slices
from memcomp.models import overview

_OFFLINE = (
  "HF_HUB_OFFLINE",
  "HF_DATASETS_OFFLINE",
  "HF_EVALUATE_OFFLINE",
  "TRANSFORMERS_OFFLINE",
)

_ROLLING = ("stream", "window")

_YAML = (".yaml", ".yml")

_BOOTSTRAP = 1000
"""Resamples for the standard errors of figures that are not means."""


def run(
  opened: load.Checkpoint,
  folder: pathlib.Path,
  *,
  seed: int | None = None,
  tasks: Sequence[str] = (),
  include_path: str = "",
  fewshot: int | None = None,
  limit: int | None = None,
  rows: int = 8,
  rolling: str = "stream",
  allow_downloads: bool = False,
) -> list[pathlib.Path | str]:
  """Runs tasks; prints figures, and writes JSON, PNG and the table's lines.

  Args:
    opened: the model.
    folder: folder for results; tasks with results there are skipped.
    seed: seed of few-shot examples and samples; None is the harness's.
    tasks: names of tasks, groups or tags, or paths of YAML files.
    include_path: folder of local tasks.
    fewshot: number of examples before each question; None is the task's.
    limit: maximum number of documents per task; None is all.
    rows: number of parallel texts.
    rolling: see `harness_model.Model`.
    allow_downloads: whether to download data sets that are not in the cache.

  Returns:
    Paths of the results, or lines about them.

  Raises:
    UserError: the extra is missing, a task is unknown, or its data are missing.
  """
  _check(tasks, rolling, include_path, fewshot, limit)
  tasks = [
    paths.expand(name) if name.endswith(_YAML) else name for name in tasks
  ]
  _set_environment(allow_downloads)
  try:
    import lm_eval
    from lm_eval import tasks as tasks_lib

    from memcomp.evaluation import harness_model
  except ImportError as error:
    raise errors.UserError(
      f"--task=harness needs lm-evaluation-harness ({error.name} is missing):"
      " pip install 'memcomp[eval]'"
    ) from error
  manager = tasks_lib.TaskManager(
    include_path=include_path or None, include_defaults=False
  )
  if not set(tasks) <= set(manager.all_tasks):
    # Loading the harness's own tasks takes a while: they are thousands of
    # files.
    manager = tasks_lib.TaskManager(include_path=include_path or None)
  loaded = {name: _load(manager, name) for name in tasks}
  results = slices.Slices(folder, "harness", opened)
  print(report.model_label(opened, step=True))
  every = []
  config = opened.config
  length = config.data.sequence_length
  state_bytes = overview.state_bytes(config.model, length)
  for name, built in loaded.items():
    model = harness_model.Model(
      opened, rows=rows, rolling=rolling, seed=seed or 0
    )
    task = {
      "task": name,
      "lm_eval": importlib.metadata.version("lm_eval"),
      "fewshot": fewshot,
      "limit": limit,
      "seed": seed,
      "rolling": rolling,
      "prefix_token": model.prefix_token_id,
    }
    task["task_hash"] = report.task_hash(
      **task, content=_content(built), tokenizer=opened.tokenizer.fingerprint
    )
    found = results.find(task_hash=task["task_hash"])
    state = "done before" if found else ""
    if not found:
      with contextlib.redirect_stdout(sys.stderr):
        measured = lm_eval.simple_evaluate(
          model=model,
          tasks=_whole(built, name),
          task_manager=manager,
          num_fewshot=fewshot,
          limit=limit,
          bootstrap_iters=_BOOTSTRAP,
          log_samples=False,
          **_seeds(seed),
        )
      found = task | _figures(measured)
      found |= {"longest": model.longest, "beyond_trained": model.beyond}
    damaged = errors.malformed(str(results.path), "move it away")
    with damaged if state else contextlib.nullcontext():
      figures = {"setting": _setting(found), "result": _result(found)}
    results.add(found, **figures, state_bytes=state_bytes)
    every.append(found)
    print(_lines(found, state), flush=True)
  written: list[pathlib.Path | str] = [results.path, folder / "results.md"]
  picture = _draw(every, opened, results.path.with_suffix(".png"))
  return [*written, picture] if picture else written


def _check(tasks, rolling, include_path, fewshot, limit) -> None:
  if not tasks:
    raise errors.UserError("--tasks is missing; name some, as --tasks=piqa")
  if rolling not in _ROLLING:
    raise errors.UserError(f"--rolling={rolling}: give stream or window")
  if include_path and not pathlib.Path(include_path).is_dir():
    raise errors.UserError(
      f"--include_path={include_path} is no folder; name that of your tasks"
    )
  for name, value, least in (("fewshot", fewshot, 0), ("limit", limit, 1)):
    if value is not None:
      limits.check(f"--{name}", value, least)


def _set_environment(allow_downloads: bool) -> None:
  """Sets environment variables before the harness's libraries are imported."""
  for name in _OFFLINE:
    os.environ[name] = "0" if allow_downloads else "1"
  os.environ.setdefault("TQDM_DISABLE", "1")  # progress is shown here
  # Worker processes would be forks of this process, which has threads.
  os.environ["DISABLE_MULTIPROC"] = "1"
  if not os.environ.get("HF_HOME") and not os.environ.get("XDG_CACHE_HOME"):
    try:
      paths.expand("~")
    except errors.UserError:
      # Without a home, as in containers, they would create a folder named ~
      # here.
      os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="memcomp-harness-")
      atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
  logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _whole(built: dict[str, Any], name: str) -> list[Any]:
  """Returns a group with its own figures, or the tasks of a tag."""
  groups = built["groups"]
  return [groups[name]] if name in groups else list(built["tasks"].values())


def _load(manager: Any, name: str) -> dict[str, Any]:
  """Returns the tasks and groups of a name or a YAML file."""
  if name not in manager.all_tasks and not name.endswith(_YAML):
    near = difflib.get_close_matches(name, manager.all_tasks, n=3)
    hint = (
      f"did you mean {' or '.join(near)}?"
      if near
      else ("give its folder as --include_path")
    )
    raise errors.UserError(f"--tasks={name}: there is no such task; {hint}")
  try:
    return manager.load([name])
  except Exception as error:  # from foreign code of several libraries
    cause = " ".join(str(error).split())[:300]
    raise errors.UserError(
      f"--tasks={name} cannot be loaded ({type(error).__name__}: {cause}); its"
      " data have to be in the cache (HF_HOME), see docs/evaluation.md, or pass"
      " --allow_downloads"
    ) from error


def _content(built: dict[str, Any]) -> str:
  """Returns a hash of the tasks' settings and documents."""
  return report.task_hash(
    tasks={
      name: {
        "config": json.loads(json.dumps(task.dump_config(), default=repr)),
        "documents": [
          json.dumps(document, sort_keys=True, default=str)
          for document in task.eval_docs
        ],
      }
      for name, task in built["tasks"].items()
    }
  )


def _seeds(seed: int | None) -> dict[str, int]:
  if seed is None:
    return {}
  names = "random_seed", "numpy_random_seed", "torch_random_seed"
  return dict.fromkeys((*names, "fewshot_random_seed"), seed)


def _figures(measured: Any) -> dict[str, Any]:
  """Returns the harness's results in a form that JSON accepts."""
  figures = {
    name: {
      metric.removesuffix(",none"): perplexity.finite(float(value))
      for metric, value in metrics.items()
      if isinstance(value, int | float) and "," in metric
    }
    for name, metrics in measured["results"].items()
  }
  return {
    "figures": figures,
    "documents": {
      name: counts["effective"]
      for name, counts in measured["n-samples"].items()
    },
    "higher_is_better": {
      name: dict(better)
      for name, better in measured["higher_is_better"].items()
    },
    "versions": dict(measured["versions"]),
    "n-shot": dict(measured["n-shot"]),
  }


def _setting(found: dict[str, Any]) -> str:
  parts = [found["task"]]
  if found["fewshot"] is not None:
    parts.append(f"{found['fewshot']} shots")
  parts.append(f"{sum(found['documents'].values()):,} documents")
  if found["rolling"] != "stream":
    parts.append(f"rolling {found['rolling']}")
  if found["seed"] is not None:
    parts.append(f"seed {found['seed']}")
  return ", ".join(parts)


def _result(found: dict[str, Any]) -> str:
  figures = found["figures"]
  own = figures.get(found["task"], next(iter(figures.values()), {}))
  return ", ".join(
    f"{metric} {_number(value)}"
    for metric, value in own.items()
    if "_stderr" not in metric
  )


def _lines(found: dict[str, Any], state: str) -> str:
  lines = []
  for name, metrics in found["figures"].items():
    for metric, value in metrics.items():
      if "_stderr" in metric:
        continue
      error = metrics.get(_error_of(metric))
      bar = f" +- {_number(error)}" if error is not None else ""
      lines.append(f"  {name:<28} {metric:<20} {_number(value)}{bar}")
  if found["beyond_trained"]:
    lines.append(
      f"  ({found['beyond_trained']:,} requests read more tokens than the"
      f" trained length, up to {found['longest']:,})"
    )
  return "\n".join(f"{line}  {state}".rstrip() for line in lines)


def _error_of(metric: str) -> str:
  name, _, filter_name = metric.partition(",")
  return f"{name}_stderr" + (f",{filter_name}" if filter_name else "")


def _number(value: float | None) -> str:
  return "not finite" if value is None else f"{value:.4g}"


def _draw(
  every: list[dict[str, Any]], opened: load.Checkpoint, path: pathlib.Path
) -> pathlib.Path | str | None:
  """Draws figures in [0, 1] where higher is better as bars; may be None."""
  bars = [
    (f"{name}\n{metric}", value, metrics.get(_error_of(metric)) or 0)
    for found in every
    for name, metrics in found["figures"].items()
    for metric, value in metrics.items()
    if "_stderr" not in metric
    and found["higher_is_better"].get(name, {}).get(metric.split(",")[0])
    and value is not None
    and 0 <= value <= 1
  ]
  if not bars:
    return None
  canvas = figures.new_canvas(7, 1.5 + 0.5 * len(bars))
  if canvas is None:
    return figures.MISSING.format(path.name)
  axes = canvas.subplots()
  names, values, deviations = zip(*bars[::-1], strict=True)
  axes.barh(range(len(bars)), values, xerr=deviations, capsize=3)
  axes.set_yticks(range(len(bars)), names, fontsize="small")
  axes.set(xlim=(0, 1.05), xlabel="share (bars: standard error)")
  axes.set_title(report.model_label(opened, step=True), fontsize="small")
  axes.grid(alpha=0.3, axis="x")
  return figures.save(canvas, path)
