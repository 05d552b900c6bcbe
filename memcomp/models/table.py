"""Writes docs/memories.md: what every mixer computes, and what it costs.

  python -m memcomp.models.table > docs/memories.md

Words and formulas are those of the memories (`memcomp_kernels/<memory>/
summary.py`), figures are counted by the mixers' configurations.
"""

import argparse
import dataclasses
import importlib
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import streams
from memcomp.layers import options, registry
from memcomp.models import presets
from memcomp_kernels import summaries

SIZE = "125m"
"""The preset whose mixers are counted."""

D_MODEL = presets.SIZES[SIZE].d_model

LENGTHS = (2_048, 32_768)
"""Tokens of a sequence that they are counted at."""

VARIANTS = {
  "key_value_means": {"budget": "power"},
  "test_time_training": {"model": "mlp"},
  "softmax_attention": {"window_size": 512},
}
"""Options with a row of their own, below their mixer's."""


class Row(NamedTuple):
  """A row of every table.

  Attributes:
    name: of the mixer.
    label: the name, with what is not as in the preset.
    config: the mixer.
    summary: its memory in words.
  """

  name: str
  label: str
  config: options.MixerConfig
  summary: summaries.Summary


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
  memory = importlib.import_module(
    f"memcomp_kernels.{registry.memory_of(name)}.summary"
  )
  label = ", ".join([name, *(f"{k}={v}" for k, v in changes.items())])
  return Row(name, f"`{label}`", config, memory.summary(config.spec()))


def sizes(config: options.MixerConfig) -> dict[str, int]:
  """Those of `summaries.LETTERS` that `config` chooses."""
  fields = dataclasses.asdict(config)
  chunk: Any = fields.get("segment_size") or fields.get("chunk_size")
  window = fields.get("window_size")
  if chunks := fields.get("window_chunks"):
    window = chunks * chunk
  found = {
    "H": fields["heads"],
    "G": fields.get("kv_heads") or fields["heads"],
    "d_k": fields["key_dim"],
    "d_v": fields["value_dim"],
    "m": fields.get("num_slots"),
    "C": chunk,
    "W": window,
    "e": fields.get("expansion"),
  }
  return {letter: size for letter, size in found.items() if size}


def whole_state_floats(config: options.MixerConfig, length: int) -> int:
  """Floats of a layer's whole state with room for `length` tokens."""

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
    writes=_table(
      ["mixer", "objective of a token", "update, then read"],
      [(r.label, r.summary.objective, r.summary.update) for r in _told()],
    ),
    chunks=_table(
      ["mixer", "what a chunk computes", "source", "pages"],
      [
        (r.label, r.summary.chunk, r.summary.source, _pages(r.name))
        for r in _told()
      ],
    ),
    floats=_table(
      ["mixer", "sizes", "floats", *lengths, f"all, {lengths[-1]}"],
      [
        (
          r.label,
          _sizes(r),
          formula(r.summary.floats),
          *(r.config.state_floats(n) for n in LENGTHS),
          whole_state_floats(r.config, LENGTHS[-1]),
        )
        for r in rows()
      ],
    ),
    flops=_table(
      ["mixer", "flops", *lengths],
      [
        (
          r.label,
          formula(r.summary.flops),
          *(r.config.memory_flops(n) for n in LENGTHS),
        )
        for r in rows()
      ],
    ),
    letters=_table(
      ["letter", "what"],
      [(f"`{a}`", b) for a, b in summaries.LETTERS.items()],
    ),
    size=SIZE,
    d_model=D_MODEL,
    lengths=" and ".join(lengths),
  )


def _told() -> list[Row]:
  """The rows but for variants whose words are their mixer's."""
  words: dict[tuple, Row] = {}
  for row in rows():
    words.setdefault((row.name, *row.summary[:4]), row)
  return list(words.values())


def _sizes(row: Row) -> str:
  """The letters of the row's formulas that its configuration chooses."""
  used = re.findall(r"\w+", f"{row.summary.floats} {row.summary.flops}")
  chosen = (f"{a}={x}" for a, x in sizes(row.config).items() if a in used)
  return f"`{', '.join(chosen)}`"


def _pages(name: str) -> str:
  memory = registry.memory_of(name)
  layer = f"{memory}.md"
  derivation = f"../kernels/memcomp_kernels/{memory}/README.md"
  return f"[layer]({layer}), [derivation]({derivation})"


def formula(expression: str) -> str:
  """A Python expression as it is printed."""
  return f"`{expression.replace(' * ', ' ').replace('**', '^')}`"


def _table(head: list[str], body: list[tuple[str | int, ...]]) -> str:
  """A Markdown table: numbers on the right, bars in cells escaped."""

  def line(cells):
    texts = (f"{x:,}" if isinstance(x, int) else x for x in cells)
    return f"| {' | '.join(x.replace('|', '\\|') for x in texts)} |"

  rules = ("---:" if isinstance(x, int) else "---" for x in body[0])
  return "\n".join([line(head), f"|{'|'.join(rules)}|", *map(line, body)])


_PAGE = """\
<!-- Written by `python -m memcomp.models.table > docs/memories.md`. -->

# The memories side by side

Every mixer of `memcomp/layers/registry.py`: what a token writes and reads, what
a chunk computes, where it is from, and what it costs. Measured times and recall
are in [results/memories.md](results/memories.md); how to put mixers into a
model is in [models.md](models.md).

## What a token does

In one head. `q`, `k`, `v` are its query, key and value, other letters those of
the derivation: a token brings decays in [0, 1] (`beta` of Trellis, `alpha`,
`mu`, `lambda`, `exp(dt A)`, `w` of RWKV-7; two-pass delta has `1 - alpha`) and
rates (`gamma`, `beta` of the delta rule, `eta`, `dt`, `a`, `theta`). `<-`
writes; reads are of what was just written, except where a prime (`M'`) says
otherwise.

{writes}

## What a chunk computes

Every `chunk` equals its `reference`, which goes token by token, and a sequence
can be cut anywhere. Where it says "exact at any tile", tiles are speed.
Elsewhere a chunk's size is meaning, a field of the `Spec`: another size is
another function.

{chunks}

## Floats of the state

Of one layer of the preset `<mixer>-{size}` (d_model {d_model}), one sequence
after {lengths} tokens: what reads need between two chunks. "All" is what
the layer's state has room for: also the copy of a chunk's start that tokens
inside a chunk need, taps of convolutions, shifted tokens, norms and factors
handed in, rows not yet in use.

{floats}

## Flops of a token

Forward, of the memory alone, without projections, in one layer: the mean over
sequences of {lengths} tokens. A multiply-add is two.

{flops}

## Letters

{letters}
"""


def main(argv: list[str] | None = None) -> int:
  """Prints the page; returns the exit code."""
  streams.prepare()
  argparse.ArgumentParser(
    prog="python -m memcomp.models.table",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  ).parse_args(argv)
  print(page(), end="")
  return 0


if __name__ == "__main__":
  sys.exit(main())
