"""Training steps of whole models on one GPU: tokens a second and MFU.

Models of 125 M parameters, as many tokens a batch for each, rows of 2,048 and
8,192; flops of a step are counted in the program (`memcomp.compiling.flops`).
"""

import pathlib
import runpy
import statistics
import time
from typing import Any

import jax
import numpy as np

from memcomp import sharding
from memcomp.compiling import flops
from memcomp.data import batch as batch_lib
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib

MODELS = (
  "trellis",
  "lattice",
  "key_value_means",
  "tensor_cache",
  "softmax_attention",
)
LENGTHS = 2048, 8192
TOKENS = 32_768
"""Of a batch."""
PEAK = {"H100": 989e12, "H200": 989e12}
"""Bfloat16 flops a second, dense, as the vendor states them."""
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_REPEATS = 5


def measure(memory: str, length: int, small: bool) -> dict[str, Any]:
  """Times a training step.

  Args:
    memory: of the model.
    length: tokens a row.
    small: a toy in place of 125 M parameters, for a machine without a GPU.
  """
  if small:
    config = runpy.run_path(str(_CONFIGS / "smoke.py"))["get_config"](memory)
    tokens = 2 * length
  else:
    config = runpy.run_path(str(_CONFIGS / "lm.py"))["get_config"](
      f"{memory}-125m"
    )
    tokens = TOKENS
  config.data.sequence_length = length
  config.training.batch_size = rows = tokens // length
  mesh = sharding.make_mesh(config.mesh)
  vocab = config.model.vocab_size
  drawn = np.random.default_rng(0).integers(1, vocab, (rows, length + 1))
  batch = batch_lib.Batch(
    tokens=drawn[:, :-1].astype(np.int32),
    targets=drawn[:, 1:].astype(np.int32),
    segment_ids=np.ones((rows, length), np.int32),
    positions=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
  )
  with jax.set_mesh(mesh):
    state = state_lib.initial_state(config, mesh)
    step = step_lib.jitted(config, mesh)
    count = flops.count(jax.make_jaxpr(step)(state, batch, None))
    found = []
    for _ in range(_REPEATS + 2):
      start = time.perf_counter()
      state, metrics = step(state, batch, None)
      jax.block_until_ready(metrics)
      found.append(time.perf_counter() - start)
  return {
    "step_s": statistics.median(found[2:]),
    "tokens": tokens,
    "flops": count,
    "loss": float(metrics["loss"]),
  }


def report(rows: Any, device: str, small: bool) -> None:
  """Measures what `rows` has not, and prints the table."""
  lengths = (64,) if small else LENGTHS
  found = [
    rows.make(
      lambda memory=memory, length=length: measure(memory, length, small),
      step=memory,
      length=length,
      device=device,
    )
    for length in lengths
    for memory in MODELS
  ]
  peak = next((x for name, x in PEAK.items() if name in device), None)
  print("\n| model | tokens a row | step, ms | tokens/s | of attention | MFU |")
  print("|---|---|---|---|---|---|")
  for row in found:
    start = f"| {row['step']} | {row['length']} |"
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
