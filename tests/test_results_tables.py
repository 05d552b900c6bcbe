"""Tables stand in the pages as the data in docs/results say.

After a change of the data: python benchmarks/model/tables.py
"""

import collections
import csv
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
sys.path.insert(0, str(ROOT / "benchmarks/model"))

import csv_tables  # noqa: E402
import length  # noqa: E402
import rates  # noqa: E402
import tables  # noqa: E402

PAGES = {
  str(page.relative_to(ROOT)): page
  for page in tables.pages()
  if tables.BLOCK.search(page.read_text())
}


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_data(name):
  text = PAGES[name].read_text()
  assert tables.filled(text) == text, "run python benchmarks/model/tables.py"


def test_a_changed_figure_is_written_anew():
  text = (RESULTS / "memories.md").read_text()
  changed = text.replace("| lattice | 512 | 1.000 |", "| lattice | 512 | 0.9 |")
  assert changed != text
  assert tables.filled(changed) == text


def marked():
  """Names of the tables of all pages: a kind, and its options."""
  text = "".join(page.read_text() for page in PAGES.values())
  return re.findall(r"<!-- table: ([^\n]+) -->", text)


def test_every_kind_of_table_is_in_use():
  assert {name.split(", ")[0] for name in marked()} == set(tables.TABLES)


def test_every_file_of_csv_has_a_table():
  kinds = [*csv_tables.TABLES, "quickstart coders"]  # beside runs there
  files = [csv_tables.file_of(kind, RESULTS) for kind in kinds]
  assert sorted(files) == sorted(RESULTS.glob("*.csv"))


@pytest.mark.parametrize("kind", csv_tables.TABLES)
def test_tables_show_all_rows_and_columns_of_their_file(kind, tmp_path):
  source = csv_tables.file_of(kind, RESULTS)
  with source.open(encoding="utf-8", newline="") as file:
    heads, *rows = csv.reader(file)
  names = [n for n in marked() if n.split(", ")[0] == kind]
  options = [n.split(", ")[1:] for n in names]

  def written(rows):
    with csv_tables.file_of(kind, tmp_path).open(
      "w", encoding="utf-8", newline=""
    ) as file:
      csv.writer(file).writerows([heads, *rows])
    return [csv_tables.table(kind, tmp_path, *option) for option in options]

  shown = written(rows)
  assert sum(x.count("\n") - 2 for x in shown) == len(rows)
  for i in range(1, len(heads)):  # an option chooses rows by the first
    assert written([[*r[:i], "", *r[i + 1 :]] for r in rows]) != shown, heads[i]


def figures(text):
  """Its numbers of three decimals, without the zero before the point."""
  found = re.findall(r"(?<![\d.,])\d*\.\d{3}(?!\d)", text)
  return {x.lstrip("0") for x in found}


def test_figures_in_prose_are_those_of_a_table():
  """So measuring anew finds the quotations of what was measured before.

  A figure that stands on one page of the results alone needs no table, nor does
  what programs print.
  """
  measured, quoted = set(), collections.defaultdict(set)
  for page in tables.pages():
    text = page.read_text("utf-8")
    for block in tables.BLOCK.finditer(text):
      measured |= figures(block[0])
    prose = re.sub(r"(?m)^    .*$", "", tables.BLOCK.sub("", text))
    for figure in figures(prose):
      quoted[figure].add(page)
  assert not {
    figure: pages
    for figure, pages in quoted.items()
    if figure not in measured
    and (len(pages) > 1 or pages.isdisjoint(RESULTS.iterdir()))
  }


def test_runs_are_added_and_take_the_place_of_their_equals(tmp_path):
  out = tmp_path / "rates.jsonl"
  run = {"mixer": "trellis", "learning_rate": 0.004, "seed": 0, "bits": 2.2}
  other, option = run | {"seed": 1}, run | {"changes": {"memory_std": 0.1}}
  length.added(out, [other, option, run], rates.identity)
  better = run | {"bits": 2.1}
  found = length.added(out, [better], rates.identity)
  assert found == length.lines(out) == [better, other, option]
