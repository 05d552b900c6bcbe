"""Writes docs/memories.md, which compares all mixers and their costs.

  python benchmarks/pages/memory_table.py > docs/memories.md

Words and formulas are the `facts` of the ops. The mixers' configs put their
sizes into the formulas.
"""

import argparse
import dataclasses
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import streams
from memcomp.layers import options, registry
from memcomp.models import presets
from memcomp_kernels import facts as facts_lib

SIZE = "125m"
"""The preset that figures are computed for."""

D_MODEL = presets.SIZES[SIZE].d_model

LENGTHS = (2_048, 32_768)
"""Sequence lengths that figures are computed for, in tokens."""

VARIANTS = {
  "key_value_means": {"budget": "power"},
  "test_time_training": {"model": "mlp"},
  "softmax_attention": {"window_size": 512},
}
"""Variants of mixers with separate rows."""


class Row(NamedTuple):
  """A row of every table.

  Attributes:
    name: name of the mixer.
    label: the name and the changes from the preset.
    config: config of the mixer.
    facts: description of its memory.
  """

  name: str
  label: str
  config: options.MixerConfig
  facts: facts_lib.Facts


def rows() -> list[Row]:
  """All mixers, each followed by its variant."""
  found = []
  for name in registry.MIXERS:
    config = presets.language_model(f"{name}-{SIZE}").mixers["memory"]
    found.append(_row(name, config, {}))
    changes: Any = VARIANTS.get(name)
    if changes:
      found.append(_row(name, dataclasses.replace(config, **changes), changes))
  return found


def _row(name: str, config: options.MixerConfig, changes: Any) -> Row:
  label = ", ".join([name, *(f"{k}={v}" for k, v in changes.items())])
  return Row(
    name, f"`{label}`", config, registry.MIXERS[name].op.facts(config.spec())
  )


def whole_state_floats(config: options.MixerConfig, length: int) -> int:
  """Floats of a layer's complete state with room for `length` tokens."""

  def state():
    module = registry.module_of(config).from_config(
      config, D_MODEL, rngs=nnx.Rngs(0)
    )
    return module.init_state(1, length)

  leaves = jax.tree.leaves(jax.eval_shape(state))
  return sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


def page() -> str:
  """The text of docs/memories.md."""
  lengths = [f"{n:,}" for n in LENGTHS]
  return _PAGE.format(
    objectives=markdown(
      ["mixer", "objective of a token", "source"],
      [(_link(r), r.facts.objective, r.facts.source) for r in _distinct_rows()],
    ),
    chunks=markdown(
      ["mixer", "what a chunk computes"],
      [(_link(r), r.facts.chunk) for r in _distinct_rows()],
    ),
    floats=markdown(
      ["mixer", "sizes", "floats", *lengths, f"all, {lengths[-1]}"],
      [
        (
          r.label,
          sizes_in_use(r),
          formula(r.facts.floats),
          *(r.config.state_floats(n) for n in LENGTHS),
          whole_state_floats(r.config, LENGTHS[-1]),
        )
        for r in rows()
      ],
    ),
    flops=markdown(
      ["mixer", "flops", *lengths],
      [
        (
          r.label,
          formula(r.facts.flops),
          *(r.config.memory_flops(n) for n in LENGTHS),
        )
        for r in rows()
      ],
    ),
    letters=markdown(
      ["letter", "what"],
      [(f"`{a}`", b) for a, b in facts_lib.LETTERS.items()],
    ),
    size=SIZE,
    d_model=D_MODEL,
    lengths=" and ".join(lengths),
  )


def _distinct_rows() -> list[Row]:
  """The rows except variants that share their mixer's words."""
  words: dict[tuple, Row] = {}
  for row in rows():
    words.setdefault((row.name, *row.facts[:3]), row)
  return list(words.values())


def sizes_in_use(row: Row) -> str:
  """The sizes that the row's formulas use, but those that tokens change."""
  used = re.findall(r"\w+", f"{row.facts.floats} {row.facts.flops}")
  found = row.config.letters(LENGTHS[-1])
  fixed = (a for a in facts_lib.LETTERS if a in used and a not in "nrRw")
  chosen = (f"{a}={found[a]}" for a in fixed)
  return f"`{', '.join(chosen)}`"


def _link(row: Row) -> str:
  """The row's label, linked to the page of its memory."""
  return f"[{row.label}]({registry.memory_of(row.name)}.md)"


def formula(expression: str) -> str:
  """Formats a Python expression."""
  return f"`{expression.replace(' * ', ' ').replace('**', '^')}`"


def markdown(head: list[str], body: list[tuple[str | int, ...]]) -> str:
  """Formats a Markdown table with right-aligned numbers and escaped bars."""

  def line(cells):
    texts = (f"{x:,}" if isinstance(x, int) else x for x in cells)
    return f"| {' | '.join(x.replace('|', '\\|') for x in texts)} |"

  rules = ("---:" if isinstance(x, int) else "---" for x in body[0])
  return "\n".join([line(head), f"|{'|'.join(rules)}|", *map(line, body)])


_PAGE = """\
<!-- Written by `benchmarks/pages/memory_table.py`. -->

# All memories side by side

Every memory and attention in one place: what a token's write improves, what a
chunk computes, how large the state is, and what a token costs. Each name leads
to its page, with the recurrence, the chunk form and all options.

How to choose:

- **Quality.** No large model was trained here. In one small model on the same
  bytes Mamba-2 and Gated DeltaNet lead ([all mixers, one
  model](results/compare.md)).
- **Recall.** What a state of each size can hold was [measured on key-value
  pairs](results/memories.md#recall). Full attention keeps every pair, and its
  state grows.
- **Size of the state.** It is fixed for all but full attention and Key-Value
  Means with a growing budget. OVQ's grows up to a bound. The sizes are
  [below](#floats-of-the-state).
- **Speed.** [Time by length](results/memories.md) was measured on CPUs, and
  [the memories with GPU kernels](results/gpu.md) on one H200.
  [Flops](#flops-of-a-token) are below.
- **Where it runs.** Each memory's page lists its TPU and GPU kernels.
- **Trained chunk size.** A memory that is not "exact at any tile" below
  computes another function with another chunk size. Keep the size that you
  trained with.

[Build a model of any mixers](models.md) combines them, layer by layer.

## What a token improves

A write is a step down an objective. The formulas describe one head. `q`, `k`,
`v` are query, key and value; other letters are those of the mixer's page. A
prime (`M'`) marks the memory before the token's write or before its chunk, see
the next table.

{objectives}

## What a chunk computes

Every `chunk` equals its `reference`, which runs token by token, and a sequence
can be cut anywhere. "Exact at any tile" means that the sizes of chunks and
tiles affect speed only. Elsewhere the chunk size is a field of the `Spec`, and
another size is another function.

{chunks}

## Floats of the state

The state of one layer and one sequence, after {lengths} tokens. The
figures are for the preset `<mixer>-{size}` (d_model {d_model}). They count
what reads need at most, without the copy from a chunk's start. "All" counts
the layer's complete state. That includes this copy, convolution taps, shifted
tokens, norms and factors from outside, and rows that are not in use yet.

{floats}

## Flops of a token

Forward flops of the memory in one layer, without projections, as the mean over
sequences of {lengths} tokens. A multiply-add counts as two.

{flops}

## Letters

{letters}
"""


def begin(about: str | None, argv: list[str] | None) -> None:
  """Reads the flags of a program that has none but `--help`."""
  streams.prepare()
  argparse.ArgumentParser(
    description=about, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args(argv)


def main(argv: list[str] | None = None) -> int:
  """Prints the page; returns the exit code."""
  begin(__doc__, argv)
  print(page(), end="")
  return 0


if __name__ == "__main__":
  sys.exit(main())
