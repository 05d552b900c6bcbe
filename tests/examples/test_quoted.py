"""The Python that pages show is the Python that tests run."""

import pathlib
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ("README.md", "docs/use.md", "kernels/README.md")


def examples() -> str:
  """All examples, without the indentation of the functions around them."""
  found = []
  for path in sorted(pathlib.Path(__file__).parent.glob("test_*_examples.py")):
    text = path.read_text()
    found += re.findall(r"# quoted: [^\n]*\n(.*?)\n *# end", text, re.S)
  return "\n\n".join(textwrap.dedent(block) for block in found)


@pytest.mark.parametrize("page", PAGES)
def test_code_on_pages_is_tested(page):
  blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
  code = examples()
  assert blocks or page != "docs/use.md"
  for block in blocks:
    assert block.strip() in code, f"{page} shows what no example runs:\n{block}"
