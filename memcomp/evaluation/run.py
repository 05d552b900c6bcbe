"""The evaluations of `eval.py`, and the one after training."""

import dataclasses
import inspect
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from memcomp import config as config_lib
from memcomp import errors, limits, paths, sharding
from memcomp import progress as progress_lib
from memcomp.evaluation import (
  harness,
  load,
  mqar,
  niah,
  plot,
  recall,
  report,
  slices,
  tasks,
  throughput,
)
from memcomp.evaluation.capacity import run as capacity

_MODULES: dict[str, Callable[..., list[pathlib.Path | str]]] = {
  "niah": niah.run,
  "harness": harness.run,
  "recall": recall.run,
  "mqar": mqar.run,
}
"""Tasks in separate modules: `run(opened, folder, *, seed=0, **flags)`
measures, prints and writes, and returns the written paths. Its keywords are the
task's flags, and have defaults."""

TASKS = (
  *("perplexity", "sample", "chat", "throughput", "capacity"),
  *_MODULES,
)
OF_RUNS = ("compare",)
"""Further tasks of `eval.py`, from `memcomp.training`, on several runs."""

_MAKE_TEXT = ("sample", "chat")

_DRAWS = (
  *("prompt", "prompt_file", "sample_tokens", "stop", "seed", "temperature"),
  *("top_k", "top_p", "min_p", "repetition_penalty"),
)
_FLAGS = {
  "perplexity": ("source", "lengths", "rows", "out"),
  "sample": _DRAWS,
  "chat": _DRAWS,
  "throughput": ("contexts", "rows", "seed", "out"),
}
"""Flags of the tasks that are not in modules of their own."""


def run(
  checkpoint: str | pathlib.Path | None,
  task: str,
  *,
  step: int | None = None,
  source: str = "",
  out: str = "",
  seed: int | None = None,
  prompt_file: str = "",
  rotary_scale: float | None = None,
  stop_strings: Sequence[str] = (),
  tensor: int = 1,
  contexts: Sequence[int | str] = (),
  overrides: dict[str, Any] | None = None,
  options: dict[str, Any] | None = None,
) -> None:
  """Evaluates a checkpoint and prints the results.

  Args:
    checkpoint: a run's workdir, its `checkpoints` folder or a step's folder,
      also in a bucket; None for "capacity".
    task: one of `TASKS`.
    step: step of the checkpoint; None is the newest.
    source: text to evaluate on, in the syntax of `DataConfig.source` without
      weights; "" is the run's validation split.
    out: folder for results; "" is `eval` in the run's workdir, except in a
      bucket.
    seed: seed of the draws; None is the task's own, usually 0.
    prompt_file: file with the text to continue; "" uses `prompt` of the
      settings. A chat reads a prompt only if one is given.
    rotary_scale: factor that stretches rotary positions (NTK), for texts beyond
      the trained length; None is the run's.
    stop_strings: texts that end a sample, and each answer of a chat.
    tensor: number of devices that shard heads and hidden features, for "sample"
      and "chat".
    contexts: lengths in tokens for "throughput", where () is 1k to 128k, and
      for "niah", where () is 1k to 8k.
    overrides: fields of `EvaluationConfig` that replace the run's.
    options: flags of a task in a separate module.

  Raises:
    UserError: unknown task, bad value, no checkpoint, no text, a full disk, or
      a flag that the task does not support.
  """
  if task not in TASKS:
    raise errors.UserError(
      f"--task={task} is unknown; give one of: {', '.join((*TASKS, *OF_RUNS))}"
    )
  paths.check_local("out", out)
  if seed is not None:
    limits.check_seed("--seed", seed)
  if task == "capacity" and checkpoint:
    raise errors.UserError(
      "--task=capacity asks a memory alone; leave out --checkpoint"
    )
  check_flags(
    task,
    {
      "step": step,
      "rotary_scale": rotary_scale,
      "seed": seed,
      "source": source,
      "out": out,
      "prompt_file": prompt_file,
      "stop": stop_strings,
      "contexts": contexts,
      "tensor": tensor,
      **(overrides or {}),
      **(options or {}),
    },
  )
  if task == "capacity":
    given = {**(overrides or {}), **(options or {})}
    out = out or "runs/capacity"
    report.announce(capacity.run(pathlib.Path(out), seed=seed or 0, **given))
    return
  if not checkpoint:
    raise errors.UserError("--checkpoint is missing; give it, or see --help")
  overrides = dict(overrides or {})
  if prompt_file:
    if "prompt" in overrides:
      raise errors.UserError(
        "--prompt and --prompt_file are both given; leave one of them out"
      )
    overrides["prompt"] = tasks.read_prompt(prompt_file)
  if paths.is_remote(checkpoint) and task not in _MAKE_TEXT and not out:
    raise errors.UserError(
      f"--checkpoint={checkpoint} lies in a bucket; say with --out where"
      " results go on this machine"
    )
  given = dict(options or {})
  if task in _MODULES:
    given |= overrides | ({"contexts": contexts} if contexts else {})
  opened = _open(checkpoint, step, tensor, task)
  if rotary_scale is not None:
    opened = load.stretch(opened, rotary_scale)
  settings = dataclasses.replace(opened.config.evaluation, **overrides)
  if not settings.sample_tokens and "sample_tokens" not in overrides:
    # The run's 0 only says that no sample follows its training.
    settings.sample_tokens = config_lib.EvaluationConfig().sample_tokens
  tasks.check(settings)
  draws = seed or 0
  if task == "sample":
    tasks.show_sample(opened, settings, draws, stop_strings)
    return
  if task == "chat":
    opening = overrides.get("prompt", "")
    tasks.talk(opened, settings, draws, stop_strings, opening)
    return
  place = pathlib.Path(out or opened.workdir / "eval")
  # Results of the run itself must not be overwritten by those of a named step.
  named = step is not None or pathlib.Path(checkpoint).name == str(opened.step)
  suffix = f"-step{opened.step}" if named else ""
  stretched = ""
  if rotary_scale is not None:
    stretched = f"rotary{load.scale_text(rotary_scale)}"
    suffix += f"-{stretched}"
  if task in _MODULES:
    # Files of slices are named by task and step alone.
    folder = report.make_folder(place / stretched)
    if seed is not None:
      given["seed"] = seed
    report.announce(_MODULES[task](opened, folder, **given))
    return
  if task == "throughput":
    numbers = tasks.contexts(contexts)
    path = report.make_folder(place) / f"throughput{suffix}.json"
    _throughput(opened, numbers, overrides.get("rows", 1), draws, path)
    return
  store = tasks.open_text(opened, source)
  for name in ("lengths", "rows"):
    if store.scored is not None and name in overrides:
      raise errors.UserError(
        f"--{name} means nothing to conversations, which are scored in windows"
        " of the trained length alone; leave it out"
      )
  folder = report.make_folder(place)
  # Results on other texts must not overwrite the run's own.
  stem = f"perplexity-{store.fingerprint[:8]}" if source else "perplexity"
  path = folder / f"{stem}{suffix}.json"
  result = slices.check_own(path, task, opened)
  if rotary_scale is not None:
    result["rotary_scale"] = rotary_scale
  found = tasks.measure(opened, store, settings)
  print(report.model_label(opened, step=True))
  if rotary_scale is not None:
    factor = load.scale_text(rotary_scale)
    print(f"rotary positions stretched by {factor} (NTK)")
  print(report.whole_text(found))
  report.write_json(path, {**result, "perplexity": found})
  written: list[pathlib.Path | str] = [path]
  if "streamed" in found:
    print(f"\n{report.positions(found['streamed'])}")
    written.append(_plot(opened, found, path.with_suffix(".png")))
  report.announce(written)


def check_flags(task: str, given: Mapping[str, Any]) -> None:
  """Raises UserError for a flag that the task does not read.

  Args:
    task: name of the task.
    given: values by flag; None, what is empty and one device were not given.
  """
  known = set(_FLAGS.get(task, ("out",)))
  measure = capacity.run if task == "capacity" else _MODULES.get(task)
  if measure:
    parameters = inspect.signature(measure).parameters.values()
    known |= {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}
  if task not in ("capacity", *OF_RUNS):
    known |= {"step", "rotary_scale", "tensor"}
  for name, value in given.items():
    absent = 1 if name == "tensor" else None
    if name not in known and value not in (absent, "", (), []):
      flag = "tokens" if name == "sample_tokens" else name
      raise errors.UserError(
        f"--{flag} means nothing to --task={task}; leave it out"
      )


def _throughput(
  opened: load.Checkpoint,
  contexts: Sequence[int],
  batch: int,
  seed: int,
  path: pathlib.Path,
) -> None:
  """Times inference; prints a table, and writes it as JSON and PNG."""
  result = slices.check_own(path, "throughput", opened)
  turns = len(set(contexts)) * (1 + throughput.ROUNDS)
  rows = throughput.measure(
    opened.model,
    contexts=contexts,
    batch=batch,
    seed=seed,
    progress=progress_lib.Progress("timing, turns", turns).advance,
  )
  label = report.model_label(opened, step=True)
  device = f"{jax.devices()[0].device_kind}, {batch} side by side"
  print(f"{label}\n{device}\n{report.throughput(rows)}")
  found = {"device": device, "batch": batch, "throughput": rows}
  report.write_json(path, {**result, **found})
  title = f"{opened.config.name}: {device}"
  picture = path.with_suffix(".png")
  report.announce([path, plot.by_context(rows, title, picture)])


def _open(
  checkpoint: str | pathlib.Path, step: int | None, tensor: int, task: str
) -> load.Checkpoint:
  """Opens a checkpoint on `tensor` devices."""
  if tensor == 1:
    return load.open_checkpoint(checkpoint, step)
  if tensor < 1:
    raise errors.UserError(f"--tensor={tensor} is not a size; use 1 or more")
  if task not in _MAKE_TEXT:
    raise errors.UserError(
      f"--tensor={tensor}: {task} runs on one device; leave the flag out"
    )
  try:
    mesh = sharding.make_mesh(config_lib.MeshConfig(tensor=tensor))
    return load.open_checkpoint(checkpoint, step, mesh)
  except errors.UserError as error:
    # The flag alone makes this mesh, not the run's config.
    text = re.sub(r"(config\.mesh|mesh\.tensor)\b", "--tensor", str(error))
    raise errors.UserError(text) from error


def after_training(
  config: config_lib.Config,
  workdir: str | pathlib.Path,
  checkpoints: str | os.PathLike = "",
) -> None:
  """Evaluates the newest checkpoint of a run at the end of `train.py`.

  It prints a table of models on the same bytes, the curve by position and a
  sample. It writes `eval/results.json` and `eval/perplexity.png`. A model
  trained on a task answers its questions instead. For one trained on
  conversations it only scores the answers.

  Args:
    config: config of the run; its `evaluation` replaces the checkpoint's.
    workdir: folder of the run, for the results.
    checkpoints: folder of the checkpoints; "" is `workdir`.

  Raises:
    UserError: bad settings, no checkpoint, or a full disk.
  """
  if jax.process_index():
    return
  settings = config.evaluation
  tasks.check(settings)
  opened = load.open_checkpoint(checkpoints or workdir)
  folder = report.make_folder(pathlib.Path(workdir) / "eval")
  result = report.describe(opened)
  written: list[pathlib.Path | str] = []
  if opened.config.data.task is not None:
    name = opened.config.data.task.name
    print("\nevaluating", flush=True)
    try:
      written = _MODULES[name](opened, folder)
    except limits.NotFiniteError as error:  # at a length, say; keep the others
      print(f"not evaluated further: {error}")
    report.write_json(folder / "results.json", result | {"task": name})
    report.announce([folder / "results.json", *written])
    return
  try:
    validation = tasks.open_text(opened, "")
  except errors.UserError as error:
    print(f"\nnot evaluated: {error}")
  else:
    print("\nevaluating", flush=True)
    found = tasks.measure(opened, validation, settings)
    result["perplexity"] = found
    if validation.scored is None:
      rows = []
      if settings.byte_models:
        rows = tasks.compare(opened, validation)
      bits = found["trained_length"]["bits_per_byte"]
      rows.append({"name": report.model_label(opened), "bits_per_byte": bits})
      result["comparison"] = rows
      print(f"\n{report.comparison(rows, found['text']['bytes'])}")
    print(f"  {report.whole_text(found)}")
    if "streamed" in found:
      print(f"\n{report.positions(found['streamed'])}")
      written.append(_plot(opened, found, folder / "perplexity.png"))
  if opened.config.data.format == "messages":
    run_folder = report.shown(folder.parent)
    print(f"\ntalk to it: memcomp chat --checkpoint={run_folder}")
  elif settings.sample_tokens:
    print(f"\n{report.sampling(settings, config.seed)}", flush=True)
    try:
      result["sample"] = tasks.show_sample(opened, settings, config.seed)
    except limits.NotFiniteError as error:  # keep the figures
      print(f"no sample: {error}")
  path = folder / "results.json"
  report.write_json(path, result)
  report.announce([path, *written])


def _plot(
  opened: load.Checkpoint, found: dict[str, Any], path: pathlib.Path
) -> pathlib.Path | str:
  """Draws `path`; returns it, or a line that explains its absence."""
  title = f"{opened.config.name}: {report.model_label(opened)}"
  return plot.by_position(
    found["streamed"], found["trained_length"], title, path
  )
