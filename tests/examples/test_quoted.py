"""The Python that pages show is the Python that tests run."""

import ast
import pathlib
import re
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/pages"))

import memory_pages as pages  # noqa: E402

PAGES = (
  "README.md",
  "docs/index.md",
  "docs/tutorials/layer.md",
  "docs/use.md",
  "kernels/README.md",
  *(f"docs/{path.name}" for path in pages.pages().values()),
)


def meaning(code: str) -> str:
  """Code without its layout and comments."""
  return ast.dump(ast.parse(code))


def examples() -> set[str]:
  """The blocks that examples mark as quoted."""
  found = []
  for path in pathlib.Path(__file__).parent.glob("test_*_examples.py"):
    found += re.findall(
      r"# quoted: [^\n]*\n(.*?)\n *# end", path.read_text(), re.S
    )
  return {meaning(textwrap.dedent(block)) for block in found}


@pytest.mark.parametrize("page", PAGES)
def test_code_on_pages_is_tested(page):
  blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
  known = examples()
  assert blocks or page == "kernels/README.md"
  for block in blocks:
    assert meaning(block) in known, (
      f"{page} shows what no example runs: {block}"
    )
