"""The diagrams of the documentation are drawn by their script."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/figures/draw.py"


def draw(out, *flags):
  command = [sys.executable, str(SCRIPT), f"--out={out}", *flags]
  subprocess.run(command, check=True, timeout=600)
  return {path.name for path in out.iterdir()}


def test_a_diagram(tmp_path):
  assert draw(tmp_path, "--only=trellis") == {"trellis.png"}
  assert (tmp_path / "trellis.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_diagram_of_the_pages_has_a_script(tmp_path):
  shown = {path.name for path in (ROOT / "docs/figures").glob("*.png")}
  assert draw(tmp_path) == shown
