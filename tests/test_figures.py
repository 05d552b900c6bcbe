"""The figures of the documentation are drawn by their scripts."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks/figures"


def draw(out, *flags, script="draw.py"):
  command = [sys.executable, str(SCRIPTS / script), f"--out={out}", *flags]
  subprocess.run(command, check=True, timeout=600)
  return {path.name for path in out.iterdir()}


def test_a_diagram(tmp_path):
  assert draw(tmp_path, "--only=trellis") == {"trellis.png"}
  assert (tmp_path / "trellis.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_of_the_results_are_drawn_from_their_numbers(tmp_path):
  drawn = draw(tmp_path, script="results.py")
  assert drawn == {"gaps.png", "inference.png"}


@pytest.mark.slow
def test_every_diagram_of_the_pages_has_a_script(tmp_path):
  shown = {path.name for path in (ROOT / "docs/figures").glob("*.png")}
  assert draw(tmp_path) == shown
