"""Time per token and state bytes of every memory, by length, in one run.

  python benchmarks/ops/lengths.py
  python benchmarks/ops/lengths.py --lengths=1024,4096 \
    --memories=trellis,softmax-full --json=FILE.json --plot=FILE.png
  python benchmarks/ops/lengths.py --measured=FILE.json --plot=FILE.png

Forward, and forward+backward with gradients of all inputs and of the initial
state; softmax attention over all tokens and over a window beside the memories.
Each figure is the median of several runs after a warm-up, memories and lengths
taken in turn so that a drifting machine hits all alike. Ratios are what counts.
"""

import dataclasses
import functools
import json
import platform
import statistics
import time
from typing import Any

import by_length
import jax
import jax.numpy as jnp
from absl import app, flags

from memcomp_kernels.key_value_means import budgets
from memcomp_kernels.testing import memories

_LENGTHS = flags.DEFINE_list(
  "lengths", ["1024", "2048", "4096", "8192", "16384", "32768"], "Tokens."
)
_MEMORIES = flags.DEFINE_list("memories", [], "Labels of some; default all.")
_HEADS = flags.DEFINE_integer("heads", 2, "Heads.")
_DIM = flags.DEFINE_integer("dim", 64, "Key and value width, and slots.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each.")
_BACKWARD = flags.DEFINE_bool("backward", True, "Time the gradient as well.")
_PLOT = flags.DEFINE_string("plot", None, "Also draw the figure here (PNG).")
_JSON = flags.DEFINE_string("json", None, "Also write the rows here.")
_MEASURED = flags.DEFINE_string(
  "measured", None, "Rows that --json wrote; then nothing is measured."
)


@dataclasses.dataclass(frozen=True)
class Case:
  """One line of the figure: a memory and its Spec's fields."""

  memory: str
  fields: dict[str, Any]

  def spec(self) -> Any:
    """The memory's meaning."""
    return memories.MEMORIES[self.memory].op.Spec(**self.fields)


def cases() -> dict[str, Case]:
  """The lines of the figure, by label."""
  dim = _DIM.value
  means = {"rotary_dim": dim // 2}
  return {
    "trellis": Case("trellis", {"num_slots": dim, "chunk_size": 64}),
    "lattice": Case("lattice", {"num_slots": dim, "chunk_size": 64}),
    "delta-net": Case("delta_rule", {"forget_gate": False}),
    "gated-delta-net": Case("delta_rule", {}),
    "infini-attention-256": Case("infini_attention", {}),
    "mamba2": Case("state_space_duality", {}),
    "linear-attention": Case("linear_attention", {}),
    "gated-slot-attention": Case("slot_attention", {"num_slots": dim}),
    "bounded-memory": Case(
      "slot_attention", {"num_slots": dim, "rule": "softmax"}
    ),
    "two-pass-delta": Case("two_pass_delta", {}),
    "rwkv7": Case("rwkv7", {}),
    "ovq-1024": Case("ovq", {}),
    "key-value-means-256": Case("key_value_means", means),
    "key-value-means-sqrt": Case(
      "key_value_means", means | {"budget": budgets.PowerLawBudget()}
    ),
    "tensor-cache-512": Case(
      "tensor_cache", {"window_size": 512, "write_population": "evicted"}
    ),
    "ttt-linear-16": Case("test_time_training", {}),
    "ttt-linear-token": Case("test_time_training", {"gradient_at": "token"}),
    "softmax-window-512": Case("softmax_attention", {"window_size": 512}),
    "softmax-full": Case("softmax_attention", {"window_size": None}),
  }


def prepare(case: Case, length: int):
  """Returns (forward, forward+backward or None, bytes of the state)."""
  memory, spec = memories.MEMORIES[case.memory], case.spec()
  dim = _DIM.value
  sizes = {"batch": 1, "heads": _HEADS.value, "key_dim": dim, "value_dim": dim}
  inputs = memory.make_inputs(jax.random.key(0), spec, time=length, **sizes)
  grows = case.memory in ("key_value_means", "softmax_attention")
  own = {"length": length} if grows else {}
  if case.memory == "two_pass_delta":
    own = {"source_dim": inputs.source.shape[-1]}
  state = memory.op.init_state(spec, **sizes, **own)
  chunk = functools.partial(
    memory.op.chunk, spec=spec, **({"max_position": 0} if grows else {})
  )
  leaves, tree = jax.tree.flatten(state)
  floats = [x if x.dtype.kind == "f" else None for x in leaves]

  def loss(floats, inputs):
    merged = [
      rest if x is None else x for x, rest in zip(floats, leaves, strict=True)
    ]
    _, y = chunk(jax.tree.unflatten(tree, merged), inputs)
    return jnp.mean(jnp.square(y))

  forward = jax.jit(lambda inputs: chunk(state, inputs)[1])
  run = [functools.partial(forward, inputs), None]
  if _BACKWARD.value:
    both = jax.jit(jax.grad(loss, argnums=(0, 1)))
    run[1] = functools.partial(both, floats, inputs)
  return run[0], run[1], sum(x.nbytes for x in leaves)


def seconds(function) -> float:
  """One timed call."""
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def measure(case_by_label: dict[str, Case], lengths: list[int]):
  """Returns the rows of the table."""
  runs = {
    (label, length): prepare(case, length)
    for length in lengths
    for label, case in case_by_label.items()
  }
  times = {key: ([], []) for key in runs}
  # All of them in turn: a machine that drifts hits all lengths alike.
  for turn in range(_REPEATS.value + 1):
    for key, run in runs.items():
      for kept, function in zip(times[key], run[:2], strict=True):
        if function is None:
          continue
        took = seconds(function)
        if turn:  # the first one compiles
          kept.append(took)
    print(f"turn {turn} of {_REPEATS.value}", flush=True)
  rows = []
  for (label, length), (forward, both) in times.items():
    row = {
      "memory": label,
      "length": length,
      "state_bytes": runs[label, length][2],
      "forward_us": statistics.median(forward) / length * 1e6,
    }
    if both:
      row["forward_backward_us"] = statistics.median(both) / length * 1e6
    rows.append(row)
  return rows


def draw(rows, file: str) -> None:
  """Draws time per token and state bytes against length."""
  from matplotlib import figure, ticker

  columns = [
    ("forward_us", 1, "forward, microseconds a token"),
    ("forward_backward_us", 1, "forward and backward, microseconds a token"),
    ("state_bytes", 1 / 1024, "state, KiB"),
  ]
  columns = [c for c in columns if c[0] in rows[0]]
  canvas = figure.Figure(figsize=(4.2 * len(columns), 4.6))
  canvas.set_layout_engine("constrained")
  panels = canvas.subplots(1, len(columns), squeeze=False)[0]
  labels = list(dict.fromkeys(row["memory"] for row in rows))
  for index, label in enumerate(labels):
    own = [row for row in rows if row["memory"] == label]
    for axes, (column, scale, _) in zip(panels, columns, strict=True):
      axes.plot(
        [row["length"] for row in own],
        [scale * row[column] for row in own],
        color=f"C{index % 10}",
        marker="osD^vPX"[index % 7],
        linestyle="--" if label.startswith("softmax") else "-",
        label=label if axes is panels[0] else None,
      )
  lengths = sorted({row["length"] for row in rows})
  for axes, (_, _, title) in zip(panels, columns, strict=True):
    axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
    axes.set_xticks(lengths, [f"{n / 1024:g}k" for n in lengths], minor=False)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.3)
  canvas.legend(loc="outside lower center", ncols=4)
  canvas.savefig(file, dpi=120)


def main(_):
  """Measures, prints the tables, writes what was asked for."""
  if _MEASURED.value:
    if not _PLOT.value:
      raise app.UsageError("--measured is drawn: give --plot=FILE.png")
    with open(_MEASURED.value) as file:
      draw(json.load(file)["rows"], _PLOT.value)
    return
  lengths = [int(n) for n in _LENGTHS.value]
  chosen = cases()
  if _MEMORIES.value:
    unknown = [m for m in _MEMORIES.value if m not in chosen]
    if unknown:
      raise app.UsageError(
        f"no memory is called {unknown[0]!r}; there are: {', '.join(chosen)}"
      )
    chosen = {label: chosen[label] for label in _MEMORIES.value}
  device = jax.devices()[0].device_kind
  rows = measure(chosen, lengths)
  print(
    f"\nbatch 1, {_HEADS.value} heads of {_DIM.value}, float32, {device}, jax"
    f" {jax.__version__}, median of {_REPEATS.value}"
  )
  titles = {
    "forward_us": "Forward, microseconds per token",
    "forward_backward_us": "Forward and backward, microseconds per token",
    "state_bytes": "State, bytes",
  }
  for column, title in titles.items():
    if column in rows[0]:
      print(f"\n{title}\n\n{by_length.table(rows, column)}", end="")
  if _PLOT.value:
    draw(rows, _PLOT.value)
  if _JSON.value:
    record = {
      "device": device,
      "platform": platform.platform(),
      "jax": jax.__version__,
      "heads": _HEADS.value,
      "dim": _DIM.value,
      "rows": rows,
    }
    with open(_JSON.value, "w") as file:
      json.dump(record, file, indent=2)


if __name__ == "__main__":
  app.run(main)
