"""Times Key-Value Means over whole sequences of growing length.

  python benchmarks/ops/growth.py
  python benchmarks/ops/growth.py --times=2048,4096 --backward=false --json=FILE

Each call is the prefill of one fresh row (`max_position=0`), forward and
forward+backward (gradients of all inputs), at budgets that grow with a power of
the tokens, stay, or saturate. The exponent is the slope of log time against log
tokens by least squares: 1 is linear, 2 is full attention. The least of
several runs after a warm-up (others may use the machine); temporary memory as
XLA plans it.
"""

import functools
import json
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from memcomp_kernels import key_value_means
from memcomp_kernels.key_value_means import budgets
from memcomp_kernels.testing import memories

_TIMES = flags.DEFINE_list(
  "times", ["2048", "4096", "8192", "16384", "32768"], "Tokens a row."
)
_HEADS = flags.DEFINE_integer("heads", 1, "Heads.")
_DIM = flags.DEFINE_integer("dim", 64, "Key and value width.")
_CHUNK = flags.DEFINE_integer("chunk_size", 256, "Chunk size.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each.")
_BACKWARD = flags.DEFINE_bool("backward", True, "Also forward+backward.")
_SEEN = flags.DEFINE_bool("seen", True, "False: at the state's capacity.")
_JSON = flags.DEFINE_string("json", None, "Also write the rows here.")

BUDGETS = {
  "16 sqrt(T)": budgets.PowerLawBudget(scale=16.0, exponent=0.5, minimum=256),
  "256": budgets.FixedBudget(256),
  "1024 T / (1024 + T)": budgets.SaturatingBudget(1024),
}


def compiled(budget, tokens: int, backward: bool):
  """Returns the program of one case and its arguments."""
  spec = key_value_means.Spec(
    chunk_size=_CHUNK.value, rotary_dim=_DIM.value // 2, budget=budget
  )
  memory = memories.MEMORIES["key_value_means"]
  sizes = {"batch": 1, "heads": _HEADS.value}
  sizes |= {"key_dim": _DIM.value, "value_dim": _DIM.value}
  inputs = memory.make_inputs(jax.random.key(0), spec, time=tokens, **sizes)
  state = key_value_means.init_state(spec, length=tokens, **sizes)
  chunk = functools.partial(
    key_value_means.chunk, spec=spec, max_position=0 if _SEEN.value else None
  )

  def loss(inputs, state):
    return jnp.mean(jnp.square(chunk(state, inputs)[1]))

  function = jax.grad(loss) if backward else lambda i, s: chunk(s, i)[1]
  return jax.jit(function).lower(inputs, state).compile(), (inputs, state)


def measured(budget, tokens: int, backward: bool) -> dict[str, float]:
  """Milliseconds (the least) and temporary mebibytes of one case."""
  program, arguments = compiled(budget, tokens, backward)
  jax.block_until_ready(program(*arguments))
  seconds = []
  for _ in range(_REPEATS.value):
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    seconds.append(time.perf_counter() - start)
  memory = program.memory_analysis().temp_size_in_bytes
  return {"ms": min(seconds) * 1e3, "mib": memory / 2**20}


def exponent(times: list[int], values: list[float]) -> float:
  """The slope of log values against log times, by least squares."""
  return float(np.polyfit(np.log(times), np.log(values), 1)[0])


def main(_):
  """Times, prints the table, writes JSON."""
  times = [int(t) for t in _TIMES.value]
  device = jax.devices()[0].device_kind
  print(
    f"key_value_means: one row, {_HEADS.value} heads, {_DIM.value} wide, chunks"
    f" of {_CHUNK.value}, float32, {device}, jax {jax.__version__}, least of"
    f" {_REPEATS.value}; ms (temporary MiB)\n"
  )
  heads = " | ".join(f"T = {t}" for t in times)
  print(f"| rows | pass | {heads} | exponent of time | of memory |")
  print("|" + "---|" * (len(times) + 4))
  rows = []
  for name, budget in BUDGETS.items():
    for backward in (False, True) if _BACKWARD.value else (False,):
      cases = [measured(budget, t, backward) for t in times]
      row = {
        "budget": name,
        "pass": "forward+backward" if backward else "forward",
        "cases": dict(zip(times, cases, strict=True)),
        "exponent": exponent(times, [c["ms"] for c in cases]),
        "memory_exponent": exponent(times, [c["mib"] for c in cases]),
      }
      rows.append(row)
      cells = " | ".join(f"{c['ms']:.0f} ({c['mib']:.0f})" for c in cases)
      print(
        f"| {name} | {row['pass']} | {cells} | {row['exponent']:.2f} |"
        f" {row['memory_exponent']:.2f} |",
        flush=True,
      )
  if _JSON.value:
    record = {
      "memory": "key_value_means",
      "device": device,
      "platform": platform.platform(),
      "jax": jax.__version__,
      "heads": _HEADS.value,
      "dim": _DIM.value,
      "chunk_size": _CHUNK.value,
      "rows": rows,
    }
    with open(_JSON.value, "w") as file:
      json.dump(record, file, indent=2)


if __name__ == "__main__":
  app.run(main)
