"""Tables of docs/results stand in the pages as their data says.

After a change of the data: python benchmarks/model/tables.py
"""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
sys.path.insert(0, str(ROOT / "benchmarks/model"))

import length  # noqa: E402
import rates  # noqa: E402
import tables  # noqa: E402

PAGES = [
  p.name for p in RESULTS.glob("*.md") if "<!-- table: " in p.read_text()
]


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_data(name):
  text = (RESULTS / name).read_text()
  assert tables.filled(text) == text, "run python benchmarks/model/tables.py"


def test_a_changed_figure_is_written_anew():
  text = (RESULTS / "memories.md").read_text()
  changed = text.replace("| lattice | 512 | 1.000 |", "| lattice | 512 | 0.9 |")
  assert changed != text
  assert tables.filled(changed) == text


def test_every_kind_of_table_is_in_use():
  text = "".join((RESULTS / name).read_text() for name in PAGES)
  assert all(f"<!-- table: {kind}" in text for kind in tables.TABLES)


def test_runs_are_added_and_take_the_place_of_their_equals(tmp_path):
  out = tmp_path / "rates.jsonl"
  run = {"mixer": "trellis", "learning_rate": 0.004, "seed": 0, "bits": 2.2}
  other, option = run | {"seed": 1}, run | {"changes": {"memory_std": 0.1}}
  length.added(out, [other, option, run], rates.identity)
  better = run | {"bits": 2.1}
  found = length.added(out, [better], rates.identity)
  assert found == length.lines(out) == [better, other, option]
