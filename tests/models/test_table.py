"""docs/memories.md is what the registry and the code say.

After a change on purpose:
python benchmarks/pages/memory_table.py > docs/memories.md
"""

import dataclasses
import itertools
import pathlib
import re
import sys

import pytest

from memcomp.layers import registry
from memcomp_kernels import facts

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks/pages"))

import memory_table as table

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "memories.md"
ROWS = {row.label: row for row in table.rows()}

# Every mixer takes those of its fields; numbers that no two terms share.
SHAPES = (
  {
    "heads": 3,
    "kv_heads": 1,
    "key_dim": 10,
    "value_dim": 14,
    "num_slots": 7,
    "expansion": 3,
    "chunk_size": 16,
    "segment_size": 16,
    "window_size": 48,
    "window_chunks": 3,
    "max_rows": 40,
    "budget_rows": 20,
    "budget_scale": 3.0,
  },
  {
    "heads": 5,
    "key_dim": 22,
    "value_dim": 6,
    "num_slots": 13,
    "expansion": 2,
    "chunk_size": 8,
    "segment_size": 8,
    "window_size": 32,
    "max_rows": 100,
    "budget_rows": 9,
  },
)


# What the other letters stand for in a shape.
FIELDS = {
  "m": lambda shape: shape["num_slots"],
  "e": lambda shape: shape["expansion"],
  "C": lambda shape: shape["chunk_size"],  # and of segments, equal here
  "G": lambda shape: shape.get("kv_heads", shape["heads"]),
}
_OF_A_WINDOW = {"window_size", "chunk_size"}


def changed(config, shape):
  names = {field.name for field in dataclasses.fields(config)}
  shape = {name: x for name, x in shape.items() if name in names}
  if not getattr(config, "window_size", 1):  # none: stays so
    shape = {k: x for k, x in shape.items() if k not in _OF_A_WINDOW}
  return dataclasses.replace(config, **shape)


def rows_in_use(name, config, tokens):
  """Rows while the token after `tokens` others is read."""
  chunks = tokens // config.chunk_size
  if name == "ovq":
    return config.spec().rows(chunks * config.chunk_size)
  return config.spec().live_rows(chunks)[-1]


def counted(name, config, length):
  """The letters that are means or counts, token by token."""
  found = {}
  chunk = getattr(config, "segment_size", 0) or getattr(config, "chunk_size", 0)
  window = getattr(config, "window_size", 0) or length
  if name == "key_value_means":
    window = config.window_chunks * chunk

  def exact_tokens(t):
    if name in ("infini_attention", "ovq") and window == length:
      return t % chunk + 1
    if name == "key_value_means" or (name == "softmax_attention" and chunk):
      return t - max(0, (t // chunk + 1) * chunk - window) + 1
    return min(t + 1, window)

  def mean(count):
    return sum(map(count, range(length))) / length

  found["w"] = mean(exact_tokens)
  if name in ("key_value_means", "ovq"):
    # A whole chunk joins at once in OVQ, else when the next one begins.
    after = length if name == "ovq" else length - 1
    found["r"] = rows_in_use(name, config, after)
    found["R"] = mean(lambda t: rows_in_use(name, config, t))
  return found


def test_the_page_is_what_the_code_says():
  assert table.page() == PAGE.read_text(), (
    "docs/memories.md is old: python benchmarks/pages/memory_table.py > docs/memories.md"
  )


def test_every_mixer_has_a_row():
  assert [r.name for r in ROWS.values() if f"`{r.name}`" == r.label] == list(
    registry.MIXERS
  )
  assert set(table.VARIANTS) <= set(registry.MIXERS)


@pytest.mark.parametrize("label", ROWS)
def test_no_cell_is_empty_or_breaks_its_table(label):
  row = ROWS[label]
  for name, cell in zip(row.facts._fields, row.facts[:5], strict=False):
    assert cell.strip() == cell != "", name
    assert "\n" not in cell and cell.count("`") % 2 == 0, name
  assert re.search(r"\b\d{4}\.\d{5}\b", row.facts.source)


def test_every_link_leads_somewhere():
  links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
  assert len(links) >= len(registry.MIXERS)
  for link in links:
    assert (PAGE.parent / link).is_file(), link


def test_every_cell_is_in_its_column():
  bars = re.compile(r"(?<!\\)\|")
  lines = [x for x in PAGE.read_text().splitlines() if x.startswith("|")]
  for head, line in itertools.pairwise(lines):
    if not line.startswith(("| mixer", "| letter", "|---")):
      assert len(bars.findall(line)) == len(bars.findall(head)), line


@pytest.mark.parametrize("label", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=("wide", "deep"))
@pytest.mark.parametrize("length", (16, 64, 320))
def test_letters_are_counts_and_means_over_the_tokens(label, shape, length):
  row = ROWS[label]
  config = changed(row.config, shape)
  found = config.letters(length)
  assert (found["H"], found["n"]) == (shape["heads"], length)
  assert (found["d_k"], found["d_v"]) == (config.key_dim, config.value_dim)
  of_config = shape if hasattr(config, "kv_heads") else {"heads": config.heads}
  for letter, value in FIELDS.items():
    if letter in found:
      assert found[letter] == value(of_config if letter == "G" else shape)
  if "W" in found:
    chunks = getattr(config, "window_chunks", 0)
    window = chunks * config.chunk_size if chunks else config.window_size
    assert found["W"] == window
  for letter, count in counted(row.name, config, length).items():
    if letter in found:
      assert found[letter] == pytest.approx(count), letter
  used = f"{row.facts.floats} {row.facts.flops}"
  assert set(re.findall(r"[A-Za-z_]+", used)) - {"min"} <= set(found)


COSTS = {  # floats of the state and flops of a token, after 9 tokens
  ("lattice", ()): (30, 392),  # 8 * 15, and 4 * (9 + 10) within a chunk
  ("lattice", (("gradient_at", "token"),)): (30, 240),
  ("trellis", ()): (60, 616),  # 6 * 3 * 10, and 8 * (10 + 6) within a chunk
  ("trellis", (("gradient_at", "token"),)): (60, 360),
  ("linear_attention", ()): (56, 224),  # a memory and a sum, written and read
  ("linear_attention", (("normalize", False),)): (48, 192),
  # 24 pairs in 9 tokens of a window of 3; a read and a write.
  ("tensor_cache", (("window_size", 3),)): (108, 299),
  ("tensor_cache", (("window_size", 3), ("rule", "delta"))): (108, 395),
  ("tensor_cache", (("window_size", 3), ("timescales", 2))): (156, 491),
}


@pytest.mark.parametrize("case", COSTS, ids=str)
def test_costs_by_hand(case):
  name, options = case
  size = {"heads": 2, "key_dim": 4, "value_dim": 6}
  config = registry.config_of(name)(**size, **dict(options))
  shape = {"num_slots": 3, "chunk_size": 4}
  if name == "lattice":
    shape["value_dim"] = 5
  if name in ("lattice", "trellis"):
    config = changed(config, shape)
  found = config.state_floats(9), config.memory_flops(9)
  assert found == COSTS[case]


def test_the_legend_has_the_letters():
  used = " ".join(f"{r.facts.floats} {r.facts.flops}" for r in ROWS.values())
  assert set(re.findall(r"[A-Za-z_]+", used)) - {"min"} == set(facts.LETTERS)


@pytest.mark.parametrize("label", ROWS)
def test_the_whole_state_holds_the_memory(label):
  config = ROWS[label].config
  assert table.whole_state_floats(config, 512) >= config.state_floats(512)


def test_help(capsys):
  with pytest.raises(SystemExit) as ended:
    table.main(["--help"])
  assert ended.value.code == 0
  assert "docs/memories.md" in capsys.readouterr().out
