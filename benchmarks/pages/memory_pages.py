"""Writes the tables of the memories' pages: costs and options.

  python benchmarks/pages/memory_pages.py

A page docs/<memory>.md marks where a table belongs by two comments, for example
`<!-- options: trellis -->` and `<!-- end -->`; what stands between them is
replaced. Formulas are the `facts` of the ops, options the fields and docstrings
of the layers' configs and the ops' Specs.
"""

import dataclasses
import pathlib
import re
import sys
from typing import Any

import memory_table as table

from memcomp.layers import options, projection, registry

DOCS = pathlib.Path(__file__).parents[2] / "docs"

_BLOCK = re.compile(
  r"(<!-- (costs|options): ([\w, ]+) -->\n).*?(<!-- end -->)", re.DOTALL
)

_SHARED = {"projection": projection.ProjectionConfig}
"""Configs without a mixer of their own, by the word in the comment."""


def pages() -> dict[str, pathlib.Path]:
  """The page of each memory, by its name in `memcomp_kernels`."""
  names = dict.fromkeys(map(registry.memory_of, registry.MIXERS))
  return {name: DOCS / f"{name}.md" for name in names}


def filled(text: str) -> str:
  """The text of a page with its tables written anew."""

  def write(found: re.Match[str]) -> str:
    start, kind, names, end = found.groups()
    write_table = {"costs": costs, "options": option_table}[kind]
    return f"{start}\n{write_table(names.split(', '))}\n\n{end}"

  return _BLOCK.sub(write, text)


def costs(names: list[str]) -> str:
  """What state and flops are, in letters and for the preset of `table.SIZE`."""
  length = table.LENGTHS[-1]
  return table.markdown(
    [
      "layer",
      "sizes",
      "floats of the state",
      f"at {length:,}",
      "flops of a token",
      f"at {length:,}",
    ],
    [
      (
        row.label,
        table.sizes_in_use(row),
        table.formula(row.facts.floats),
        row.config.state_floats(length),
        table.formula(row.facts.flops),
        row.config.memory_flops(length),
      )
      for row in table.rows()
      if row.name in names
    ],
  )


def option_table(names: list[str]) -> str:
  """The options of layers, with the default of each and what it does."""
  configs = [_SHARED.get(n) or registry.config_of(n) for n in names]
  about = options.meanings(configs[0])
  several = len(configs) > 1
  heads = [f"`{n}`" for n in names] if several else ["default"]
  rows: list[tuple[str | int, ...]] = []
  for field in _own_fields(configs[0]):
    values = (_default(config, field.name) for config in configs)
    rows.append((f"`{field.name}`", *values, about[field.name]))
  return table.markdown(["option", *heads, "what it does"], rows)


def _own_fields(config: Any) -> list[dataclasses.Field]:
  """Fields but for those that shared configs have with the same default."""
  shared = {f.name: f.default for f in dataclasses.fields(options.MixerConfig)}
  if config not in _SHARED.values():
    for other in _SHARED.values():
      if issubclass(config, other):
        shared |= {f.name: f.default for f in dataclasses.fields(other)}
  fields = [
    field
    for field in dataclasses.fields(config)
    if field.name not in shared or shared[field.name] != field.default
  ]
  of_spec = [field.name for field in config.spec_fields()]
  return sorted(fields, key=lambda field: field.name not in of_spec)


def _default(config: Any, name: str) -> str:
  field = next(f for f in dataclasses.fields(config) if f.name == name)
  make: Any = field.default_factory
  if make is not dataclasses.MISSING:
    return f"`{make().method}`"  # of a solver
  return f"`{field.default}`"


def main(argv: list[str] | None = None) -> int:
  """Rewrites the tables in the pages; returns the exit code."""
  table.begin(__doc__, argv)
  for path in pages().values():
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
