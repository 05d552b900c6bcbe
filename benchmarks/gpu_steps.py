"""Training steps of whole models on one GPU: tokens a second and MFU.

Models of 125 M parameters, as many tokens a batch for each, rows of 2,048 and
8,192 that are one segment each; flops of a step are counted in the program
(`memcomp.compiling.flops`).
"""

import contextlib
import pathlib
import runpy
import statistics
import time
from typing import Any

import hopper
import jax
import numpy as np

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.compiling import flops
from memcomp.training import feed
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib
from memcomp_kernels.pallas_gpu import tile_kernel

MODELS = (
  ("softmax_attention", "library_gpu"),
  ("trellis", "mosaic_gpu"),
  ("trellis", "xla_chunked"),
  ("lattice", "mosaic_gpu"),
  ("lattice", "xla_chunked"),
  ("tensor_cache", "mosaic_gpu"),
  ("tensor_cache", "xla_chunked"),
  ("key_value_means", "xla_chunked"),
)
"""Memories, and implementations of them, the default first."""
LENGTHS = 2048, 8192
TOKENS = 32_768
"""Of a batch."""
PEAK = {"H100": 989e12, "H200": 989e12}
"""Bfloat16 flops a second, dense, as the vendor states them."""
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_REPEATS = 5


def experiment(
  memory: str, form: str, length: int, small: bool
) -> config_lib.Config:
  """Returns the config of a model, see `measure`."""
  lm = runpy.run_path(str(_CONFIGS / "lm.py"))
  config = lm["get_config"](f"{memory}-125m")
  config.data.sequence_length, config.data.packing = length, "joined"
  config.training.implementation = form
  config.training.batch_size = (2 * length if small else TOKENS) // length
  if small:
    model = config.model
    model.remat = "none"  # around which the interpreter has no gradients
    model.num_layers, model.vocab_size = 1, 256
    model.d_model, model.mixers["memory"].heads, model.mlp_dim = 128, 2, 128
  return config


def measure(
  memory: str, form: str, length: int, turn: Any, small: bool
) -> dict[str, Any]:
  """Times a training step.

  Args:
    memory: of the model.
    form: of it, see `MODELS`.
    length: tokens a row.
    turn: returns a context in which nobody else uses the GPU.
    small: a layer of a small model in place of 125 M parameters, for a machine
      without a GPU.
  """
  config = experiment(memory, form, length, small)
  mesh = sharding.make_mesh(config.mesh)
  drawn = np.random.default_rng(0).integers(
    1,
    config.model.vocab_size,
    (2, config.training.batch_size, length),
    dtype=np.int32,
  )
  with jax.set_mesh(mesh):
    batch = feed.abstract_batch(config, mesh)
    batch = batch._replace(tokens=drawn[0], targets=drawn[1])
    state = state_lib.initial_state(config, mesh)
    step = step_lib.jitted(config, mesh)
    count = flops.count(jax.make_jaxpr(step)(state, batch, None))
    found = []
    with contextlib.ExitStack() as alone:
      for i in range(_REPEATS + 2):
        if i == 1:  # the first compiles
          alone.enter_context(turn())
        start = time.perf_counter()
        state, metrics = step(state, batch, None)
        jax.block_until_ready(metrics)
        found.append(time.perf_counter() - start)
  return {
    "step_s": statistics.median(found[2:]),
    "tokens": drawn[0].size,
    "flops": count,
    "loss": float(metrics["loss"]),
  }


def static(lengths: tuple[int, ...] = LENGTHS) -> None:
  """Compiles the steps for an H100, and prints what memory they need."""
  gib = 2**30
  print("\n| model | form | tokens a row | state, GiB | beside it, GiB |")
  print("|---|---|---|---|---|")
  for length in lengths:
    for memory, form in MODELS:
      config = experiment(memory, form, length, small=False)
      mesh = sharding.make_mesh(config.mesh, [hopper.device()])
      with jax.set_mesh(mesh), tile_kernel.lowered():
        state = state_lib.abstract_state(config, mesh)
        batch = feed.abstract_batch(config, mesh)
        traced = step_lib.jitted(config, mesh).trace(state, batch)
        lowered = traced.lower(lowering_platforms=("cuda",))
        found = lowered.compile().memory_analysis()
      print(
        f"| {memory} | {form} | {length}"
        f" | {found.argument_size_in_bytes / gib:.2f}"
        f" | {found.temp_size_in_bytes / gib:.2f} |",
        flush=True,
      )


def report(rows: Any, device: str, turn: Any, small: bool) -> None:
  """Measures what `rows` has not, and prints the table."""
  lengths = (64,) if small else LENGTHS
  found = [
    rows.make(
      lambda memory=memory, form=form, length=length: measure(
        memory, form, length, turn, small
      ),
      step=memory,
      form=form,
      length=length,
      device=device,
    )
    for length in lengths
    for memory, form in MODELS
  ]
  peak = next((x for name, x in PEAK.items() if name in device), None)
  print(
    "\n| model | form | tokens a row | step, ms | tokens/s | of attention | MFU"
    " |\n" + "|---" * 7 + "|"
  )
  for row in found:
    start = f"| {row['step']} | {row['form']} | {row['length']} |"
    if "error" in row:
      print(f"{start} {row['error']} |")
      continue
    rate = row["tokens"] / row["step_s"]
    base = rows.find(
      step="softmax_attention", length=row["length"], device=device
    )
    of_base = "-"
    if base and "step_s" in base:
      of_base = f"{rate * base['step_s'] / base['tokens']:.2f}"
    mfu = f"{row['flops'] / row['step_s'] / peak:.1%}" if peak else "-"
    print(
      f"{start} {1e3 * row['step_s']:.1f} | {rate:,.0f} | {of_base} | {mfu} |"
    )
