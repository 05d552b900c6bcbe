"""Recall: small decoders learn MQAR; accuracy against pairs, per memory.

  python benchmarks/model/recall.py --mixers=trellis,softmax_attention \
    --pairs=4,8,16,32 --length=128 --vocab=256 --steps=2000 --seeds=2 \
    --out=docs/results/recall

Two layers of d_model 64, trained on rows of mqar-fast: the fewest pairs first,
then all numbers of pairs in turn. Accuracy on fresh rows, per number of pairs.
Writes <out>.json, <out>.md and <out>.png.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from flax import nnx

from memcomp.data.synthetic import mqar
from memcomp.models import decoder, registry

_MIXERS = flags.DEFINE_list("mixers", None, "Mixers; default all there are.")
_PAIRS = flags.DEFINE_list("pairs", "4,8,16,32", "Numbers of pairs.")
_LENGTH = flags.DEFINE_integer("length", 128, "Tokens a row.")
_VOCAB = flags.DEFINE_integer("vocab", 256, "Token ids.")
_STEPS = flags.DEFINE_integer("steps", 2000, "Updates.")
_BATCH = flags.DEFINE_integer("batch", 64, "Rows an update.")
_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Peak learning rate.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each mixer.")
_OUT = flags.DEFINE_string("out", "recall", "Path of the results, no suffix.")

_FRESH_ROWS = 512
_WARMUP = 50
_BLOCK = 50  # updates a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What is learned, and for how long."""

  pairs: tuple[int, ...]
  length: int
  vocab_size: int
  steps: int
  batch: int
  learning_rate: float


def model_config(mixer: str, task: Task) -> decoder.DecoderConfig:
  """A small decoder around the mixer; its state is a few thousand floats."""
  fields: dict[str, Any] = {"heads": 2, "key_dim": 32, "value_dim": 32}
  fields |= {
    "trellis": {"num_slots": 32},
    "softmax_attention": {"rotary_dim": 16, "max_length": task.length},
    "key_value_means": {
      "rotary_dim": 16,
      "chunk_size": 8,
      "budget_rows": 16,
      "max_length": task.length,
    },
    "lattice": {"num_slots": 32},
    "tensor_cache": {"rotary_dim": 16, "window_size": 16, "chunk_size": 8},
    "test_time_training": {"rotary_dim": 0, "convolution_width": 4},
  }.get(mixer, {})
  return decoder.DecoderConfig(
    vocab_size=task.vocab_size,
    d_model=64,
    num_layers=2,
    mlp_dim=128,
    mixer=registry.config_of(mixer)(**fields),
    # Attention needs each value to know its key: all get what some have.
    embedding_convolution=4,
    init_std=0.1,
    embedding_std=0.1,
  )


def pairs_at(task: Task, step: int) -> int:
  """The number of pairs of an update's rows.

  In turn, but first the easiest alone, all from the middle of the run on: rows
  of many pairs teach little to a model that cannot yet recall few.
  """
  kinds = 1 + 2 * step * len(task.pairs) // task.steps
  return task.pairs[step % min(kinds, len(task.pairs))]


def train(
  config: decoder.DecoderConfig, task: Task, seed: int
) -> dict[int, float]:
  """Trains on mqar-fast; returns accuracy on fresh rows by number of pairs."""
  with nnx.use_eager_sharding(False):
    model = decoder.Decoder(config, rngs=nnx.Rngs(seed))
  graph, params = nnx.split(model)
  warmup = min(_WARMUP, task.steps // 4)
  rate = optax.warmup_cosine_decay_schedule(
    0.0, task.learning_rate, warmup, task.steps
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.1)
  )

  def logits_of(params, inputs):
    model = nnx.merge(graph, params)
    hidden, _ = model(inputs)
    return model.logits(hidden)

  def loss_of(params, inputs, labels):
    asked = labels != mqar.IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits_of(params, inputs), jnp.where(asked, labels, 0)
    )
    return jnp.sum(jnp.where(asked, losses, 0)) / jnp.sum(asked)

  @functools.partial(jax.jit, donate_argnums=0)
  def updates(carry, rows):
    def update(carry, row):
      params, moments = carry
      loss, gradient = jax.value_and_grad(loss_of)(params, *row)
      change, moments = optimizer.update(gradient, moments, params)
      return (optax.apply_updates(params, change), moments), loss

    return jax.lax.scan(update, carry, rows)

  @jax.jit
  def hits(params, inputs, labels):
    asked = labels != mqar.IGNORED
    right = jnp.argmax(logits_of(params, inputs), axis=-1) == labels
    return jnp.sum(right & asked) / jnp.sum(asked)

  def rows(pairs, count, seed):
    found = mqar.fast(
      vocab_size=task.vocab_size,
      num_examples=count,
      length=task.length,
      pairs=pairs,
      seed=seed,
    )
    return [x.astype(np.int32) for x in found]

  def block(first):
    batches = [
      rows(pairs_at(task, i), task.batch, 2**20 * (seed + 1) + i)
      for i in range(first, min(first + _BLOCK, task.steps))
    ]
    return [np.stack(x) for x in zip(*batches, strict=True)]

  # With the types of what an update returns, or it is compiled twice.
  carry = jax.tree.map(
    lambda x: jnp.asarray(x, x.dtype), (params, optimizer.init(params))
  )
  for first in range(0, task.steps, _BLOCK):
    carry, losses = updates(carry, block(first))
    logging.info("update %d: loss %.3f", first, float(losses.mean()))
  return {
    pairs: float(hits(carry[0], *rows(pairs, _FRESH_ROWS, seed)))
    for pairs in task.pairs
  }


def measure(mixer: str, task: Task, seeds: int) -> dict[str, Any]:
  """Trains `seeds` times; one line of results."""
  config, begun = model_config(mixer, task), time.monotonic()
  runs = [train(config, task, seed) for seed in range(seeds)]
  return {
    "mixer": mixer,
    "state_floats": config.mixer.state_floats(task.length),
    "seconds": round((time.monotonic() - begun) / seeds, 1),
    "accuracy": {n: [run[n] for run in runs] for n in task.pairs},
  }


def table(task: Task, results: list[dict[str, Any]]) -> str:
  """A table in markdown: means over seeds, and from the worst to the best."""
  lines = [
    "| memory | floats of state a layer | "
    + " | ".join(f"{n} pairs" for n in task.pairs)
    + " |",
    "|---" * (2 + len(task.pairs)) + "|",
  ]
  for row in results:
    cells = [row["mixer"], f"{row['state_floats']:,}"]
    for n in task.pairs:
      found = row["accuracy"][n]
      spread = f" ({min(found):.3f}-{max(found):.3f})" * (len(found) > 1)
      cells.append(f"{np.mean(found):.3f}{spread}")
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines) + "\n"


def report(record: dict[str, Any]) -> str:
  """What was measured, how and where, in markdown."""
  task = Task(**record["task"])
  return f"""# Recall: accuracy on mqar-fast against key-value pairs

{table(task, record["results"])}
![accuracy against pairs]({record["figure"]})

Two layers of d_model 64 and a convolution of four taps on the embeddings, one
model for all numbers of pairs, the fewest first: {task.steps:,} updates of
{task.batch} rows of {task.length} tokens (vocabulary {task.vocab_size}),
{record["seeds"]} seed(s).
Accuracy on {_FRESH_ROWS} fresh rows each; chance is {2 / task.vocab_size:.3f}.

    {record["command"]}

{record["machine"]}
"""


def draw(task: Task, results: list[dict[str, Any]], path: str) -> None:
  """Accuracy against pairs, one line per memory; bars from worst to best."""
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  canvas = figure.Figure(figsize=(6, 4), layout="constrained")
  axes = canvas.subplots()
  for row in results:
    found = np.array([row["accuracy"][n] for n in task.pairs])
    mean = found.mean(axis=1)
    axes.errorbar(
      task.pairs,
      mean,
      [mean - found.min(axis=1), found.max(axis=1) - mean],
      marker="o",
      capsize=3,
      label=f"{row['mixer']} ({row['state_floats']:,} floats a layer)",
    )
  axes.set_xscale("log", base=2)
  axes.set_xticks(task.pairs, [str(n) for n in task.pairs])
  axes.set(
    xlabel=f"key-value pairs in {task.length} tokens",
    ylabel="accuracy of recall",
    ylim=(0, 1.03),
  )
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small")
  canvas.savefig(path, dpi=110)


def main(argv):
  """Trains every mixer and writes what it found."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  task = Task(
    pairs=tuple(sorted(int(n) for n in _PAIRS.value)),
    length=_LENGTH.value,
    vocab_size=_VOCAB.value,
    steps=_STEPS.value,
    batch=_BATCH.value,
    learning_rate=_RATE.value,
  )
  out = pathlib.Path(_OUT.value)
  results = []
  for mixer in _MIXERS.value or list(registry.MIXERS):
    results.append(measure(mixer, task, _SEEDS.value))
    print(json.dumps(results[-1]), flush=True)
  record = {
    "command": " ".join(["python", *sys.argv]),
    "machine": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax"
    f" {jax.__version__}",
    "figure": out.with_suffix(".png").name,
    "seeds": _SEEDS.value,
    "task": dataclasses.asdict(task),
    "results": results,
  }
  out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
  out.with_suffix(".md").write_text(report(record))
  draw(task, results, str(out.with_suffix(".png")))


if __name__ == "__main__":
  app.run(main)
