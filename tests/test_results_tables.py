"""Tables of docs/results stand in the pages as their data says.

After a change of the data: python benchmarks/model/tables.py
"""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
sys.path.insert(0, str(ROOT / "benchmarks/model"))

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
