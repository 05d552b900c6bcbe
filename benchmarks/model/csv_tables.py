"""What the tables of docs/results show of the files of CSV beside the pages.

The table `capacity first` is of capacity-first.csv. An option, as in
`gaps, gap 24`, picks the rows that have it in the file's first column.
"""

import csv
import itertools
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import rates

Row = dict[str, Any]
Function = Callable[[Row, Row], str]
Form = str | Function
"""A format of a row's columns, or a function of the row and the table's first.

A column that was not measured is no key of the row.
"""


def table(kind: str, folder: pathlib.Path, option: str = "") -> str:
  """The table of a kind, without columns that are empty in all of its rows."""
  rows = lines(file_of(kind, folder))
  if option:
    first = next(iter(rows[0]))
    rows = [row for row in rows if str(row.get(first)) == option]
  columns = []
  for heading, *forms in TABLES[kind]:
    cells = [_cell(forms, row, rows[0]) for row in rows]
    if any(cells):
      numbers = any(x and not re.search("[A-Za-z]", x) for x in cells)
      rule = "---:" if numbers else "---"
      columns.append([heading.format_map(rows[0]), rule, *cells])
  return rates.markdown(*map(list, zip(*columns, strict=True)))


def file_of(kind: str, folder: pathlib.Path) -> pathlib.Path:
  """The file that has the figures of all tables of a kind."""
  return folder / f"{kind.replace(' ', '-')}.csv"


def lines(path: pathlib.Path) -> list[Row]:
  """The rows of a file, each without the columns that are empty in it."""
  with path.open(encoding="utf-8", newline="") as file:
    return [
      {name: _parsed(text) for name, text in line.items() if text}
      for line in csv.DictReader(file)
    ]


def _parsed(text: str) -> int | float | str:
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text


def _cell(forms: list[Form], row: Row, first: Row) -> str:
  """By the first of the forms whose columns were all measured."""
  for form in forms:
    try:
      return form.format_map(row) if isinstance(form, str) else form(row, first)
    except KeyError:
      pass
  return ""


def _seeds(name: str, count: int, form: str = ":.3f") -> str:
  return ", ".join(f"{{{name}_seed{i}{form}}}" for i in range(count))


def _difference(name: str) -> str:
  """Mean and standard error of a difference."""
  return f"{{{name}:+.3f}} +- {{{name}_error:.3f}}"


def _bare(form: str) -> Function:
  """Without a zero before the point."""
  return lambda row, _: re.sub(r"\b0(?=\.)", "", form.format_map(row))


def _plain(form: str) -> Function:
  """Without a plus in an exponent."""
  return lambda row, _: form.format_map(row).replace("e+", "e")


def _supported(name: str) -> Function:
  """A difference, bold where it is enough for another default."""

  def form(row: Row, first: Row) -> str:
    enough = abs(row[name]) > 3 * row[f"{name}_error"] and row["seeds"] >= 5
    mark = "**" if enough else ""
    return _bare(f"{mark}{_difference(name)}{mark}")(row, first)

  return form


def _ends(name: str, form: str) -> Function:
  """A figure at the first and the last context; one where they print alike."""

  def both(row: Row, _: Row) -> str:
    ends = [format(row[f"{name}_{end}"], form) for end in ("first", "last")]
    return " - ".join(dict.fromkeys(ends))

  return both


def _to_paper_base(row: Row, first: Row) -> str:
  """The log2 ratio of the paper's figure to that of the base."""
  ratio = math.log2(row["paper_perplexity"] / first["paper_perplexity"])
  return "" if row is first else f"{ratio:+.3f}"


def _of_seed_1(row: Row, _: Row) -> str:
  """The shortest rows less the longest, with the second seed."""
  short, long = row["bits_512_seed1"], row["bits_8192_seed1"]
  return f"{short:.3f} - {long:.3f} = {short - long:+.3f}"


def _later_seed(row: Row, _: Row) -> str:
  """The model, and its seed unless that is the first."""
  return f"{row['model']}, seed {row['seed']}" if row["seed"] else row["model"]


_EXACTNESS = [
  ("mean", "{mean:.3f}"),
  ("sd", "{sd:.3f}"),
  ("less chunk 16", _difference("less_chunk_16")),
]

TABLES: dict[str, list[tuple[Any, ...]]] = {
  "ablations": [
    ("{memory}", "{variant}"),
    ("bits per byte, by seed", _seeds("bits", 2)),
    ("less base", _difference("less_base")),
    ("paper's perplexity", "{paper_perplexity:.2f}"),
    ("its log2 ratio to base", _to_paper_base),
    ("largest gradient", "{largest_gradient:,.4g}"),
  ],
  "beyond": [
    ("model", "{model}"),
    ("floats of state at 512", "{state_floats:,}"),
    *(
      (f"{n} tokens", f"{{accuracy_{n}:.3f}} ({_seeds(f'accuracy_{n}', 2)})")
      for n in (64, 128, 256, 512)
    ),
  ],
  "beyond needles": [
    ("updates, seed", "{updates:,}, {seed}"),
    ("1,024 bytes (trained)", "{holds_1024} ({begins_1024})"),
    *(
      (f"{n:,}", f"{{holds_{n}}} ({{begins_{n}}})") for n in (2048, 4096, 8192)
    ),
  ],
  "capacity": [
    ("key_dim", "{key_dim}"),
    ("rule", "{rule}"),
    ("decay", "{decay}"),
    *(
      (heading, f"{{found_{n}:.3f}} ({{error_{n}:.2f}})")
      for heading, n in {
        "n = 1/8 key_dim": "1_8",
        "1/4": "1_4",
        "1/2": "1_2",
        "1": "1",
        "2": "2",
        "4": "4",
      }.items()
    ),
  ],
  "capacity first": [
    ("key_dim", "{key_dim}"),
    ("keys", "{keys}"),
    ("decay", "{decay}"),
    ("capacity", "{capacity:.1f} ± {capacity_error:.1f}"),
    ("deviation", "{deviation:.1f}"),
    ("5 draws", "{capacity_5:.1f} ± {deviation_5:.1f}"),
    ("expected", "{expected:.1f}"),
    ("simulated, 200", "{simulated:.1f}", "-"),
    ("simulated, 5", "{simulated_5} ± {simulated_5_deviation}"),
  ],
  "compare": [
    ("model", "{model}"),
    ("bits per byte at 512", "{bits:.3f}±{bits_sd:.3f}"),
    ("up to 4,096", "{bits_to_4096:.3f}±{bits_to_4096_sd:.3f}"),
    ("state, bytes", "{state_bytes:,}"),
    ("tokens/s", "{tokens_per_second:,}", "not timed"),
    ("parameters", "{parameters:,}"),
  ],
  "contexts": [
    ("model, seed 0", "{model}"),
    *((f"{n:,}", f"{{bits_{n}_seed0:.3f}}") for n in (512, 2048, 8192)),
    ("512 less 8,192", "{difference_seed0:+.3f}"),
    ("the same, seed 1", _of_seed_1, "{bits_512_seed1:.3f} at 512"),
  ],
  "convert": [
    ("bits per byte", "{stage}"),
    ("Trellis", "{trellis:.3f}"),
    ("Gated DeltaNet", "{gated_delta_net:.3f}"),
  ],
  "convert distillation": [
    ("step", "{step}"),
    ("Trellis, layer 0", "{trellis_layer0:.2f}"),
    ("layer 1", "{trellis_layer1:.2f}"),
    ("Gated DeltaNet, layer 0", "{gated_delta_net_layer0:.2f}"),
    ("layer 1", "{gated_delta_net_layer1:.2f}"),
  ],
  "exact-training": [
    ("variant", "{variant}"),
    ("x", _bare("{x:,}"), _bare("< {x_below}")),
    ("seeds", "{seeds}"),
    ("bits per byte", "{bits:.3f}"),
    ("sd", _bare("{bits_sd:.3f}")),
    ("less base", _supported("less_base")),
    ("less stale", _supported("less_stale")),
    ("largest gradient", _plain("{largest_gradient}"), "not kept"),
    ("median", _plain("{median_gradient}"), "not kept"),
  ],
  "exactness text": [
    ("memory", "{memory}"),
    ("text", "bits per byte"),
    ("gradients at", "{gradients_at}"),
    ("by seed", _seeds("bits", 3)),
    *_EXACTNESS,
  ],
  "exactness recall": [
    ("memory", "{memory}"),
    ("recall", "{pairs} pairs"),
    ("gradients at", "{gradients_at}"),
    ("by seed", _seeds("accuracy", 3)),
    *_EXACTNESS,
  ],
  "exactness gradients": [
    ("memory", "{memory}"),
    ("gradients at", "{gradients_at}"),
    ("largest norm, by seed", _seeds("largest", 3, ":.3g")),
    ("median", "{median:.2f}"),
    ("over 10", "{over_10}"),
    ("seconds a run", "{seconds}"),
  ],
  "gaps": [
    ("trained at {trained_at}", "{name}"),
    ("state, bytes", "{state_bytes:,}"),
    ("nats there", "{nats:.3f}"),
    ("seeds", "{seeds}"),
    *(
      (f"{gap}", f"{{accuracy_{gap}:.3f}}")
      for gap in (12, 24, 36, 48, 64, 96, 128, 192, 256, 512, 1024)
    ),
  ],
  "inference": [
    ("model", "{model}"),
    ("contexts", _ends("context", ",")),
    ("KiB of state", _ends("state_kib", ",")),
    ("ms a token", _ends("ms_per_token", ".3f")),
    ("longest / shortest", "{longest_over_shortest:.2f}"),
    ("slowest / fastest", "{slowest_over_fastest:.2f}"),
    ("tokens/s read", _ends("tokens_per_second", ",")),
  ],
  "inference prompt": [
    ("tokens", "{tokens:,}"),
    ("peak before", "{peak_before_mib} MiB"),
    ("peak after", "{peak_after_mib} MiB"),
    ("tokens/s", "{tokens_per_second:,}"),
  ],
  "quickstart forms": [
    ("form", "{form}"),
    ("forward ms", "{forward_ms:.1f}"),
    ("forward+backward ms", "{both_ms:.1f}"),
    ("of reference", "{speedup:.1f}x"),
    ("bwd / fwd", "{ratio:.1f}"),
  ],
  "quickstart settings": [
    ("changed", "{changed}"),
    *((f"seed {i}", f"{{bits_seed{i}:.3f}}", "-") for i in range(3)),
  ],
  "shakespeare": [
    ("", _later_seed),
    ("state", "{state_bytes:,}"),
    ("whole text", "{bits:.3f}"),
    *(
      (f"{at:,}-{end - 1:,}", f"{{bits_{at}:.3f}} ±{{bits_{at}_error:.3f}}")
      for at, end in itertools.pairwise([0, *(256 << i for i in range(7))])
    ),
  ],
}
"""Columns of each kind: a heading, and forms of its cells.

That form counts whose columns were all measured, the first if there are more.
"""
