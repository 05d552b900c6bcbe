"""The pages of the memories have the code's options and costs.

After a change on purpose: python benchmarks/pages/memory_pages.py
"""

import dataclasses
import pathlib
import re
import sys

import pytest

from memcomp.layers import registry

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks/pages"))

import memory_pages as pages

PAGES = pages.pages()
TEXTS = {name: path.read_text("utf-8") for name, path in PAGES.items()}
SECTIONS = [
  "The recurrence",
  "State and cost",
  "The chunk form",
  "What runs where",
  "Options",
  "What the paper leaves open",
  "Measured",
  "Paper",
]


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_what_the_code_says(name):
  assert pages.filled(TEXTS[name]) == TEXTS[name], (
    f"docs/{name}.md is old: python benchmarks/pages/memory_pages.py"
  )


@pytest.mark.parametrize("name", PAGES)
def test_every_page_answers_the_same_questions(name):
  assert re.findall(r"^## (.*)$", TEXTS[name], re.MULTILINE) == SECTIONS
  assert (PAGES[name].parent / f"figures/{name}.png").is_file()
  assert f"](figures/{name}.png)" in TEXTS[name]


@pytest.mark.parametrize("mixer", registry.MIXERS)
def test_every_option_of_a_mixer_is_on_its_page(mixer):
  text = TEXTS[registry.memory_of(mixer)]
  shared = TEXTS["softmax_attention"]
  for field in dataclasses.fields(registry.config_of(mixer)):
    if field.name not in ("heads", "key_dim", "value_dim"):
      assert f"`{field.name}`" in text or f"\n| `{field.name}` |" in shared


def test_old_tables_are_found():
  text = TEXTS["trellis"]
  old = text.replace("| `phi_eps` | `1.0` |", "| `phi_eps` | `0.1` |")
  assert old != text
  assert pages.filled(old) == text


def test_links_lead_somewhere():
  for name, path in PAGES.items():
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXTS[name]):
      assert (path.parent / link).exists(), f"{name}: {link}"


def test_main_rewrites_pages(tmp_path, monkeypatch):
  monkeypatch.setattr(pages, "DOCS", tmp_path)
  for name in PAGES:
    (tmp_path / f"{name}.md").write_text("<!-- costs: ovq -->\n<!-- end -->\n")
  assert pages.main([]) == 0
  assert "H (r" in (tmp_path / "rwkv7.md").read_text()
