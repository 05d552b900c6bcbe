"""Draws the diagrams of the documentation.

  python benchmarks/figures/draw.py --out=docs/figures

Writes a PNG of each memory, of the architecture and of state passing. Needs
matplotlib (extra `plot`) alone.
"""

import argparse
import pathlib

import baselines
import memories
import system

DIAGRAMS = memories.DIAGRAMS | baselines.DIAGRAMS | system.DIAGRAMS


def main(argv: list[str] | None = None) -> None:
  """Writes the figures that are asked for."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", default="docs/figures", help="Folder.")
  parser.add_argument("--only", default="", help="Comma-separated names.")
  arguments = parser.parse_args(argv)
  out = pathlib.Path(arguments.out)
  out.mkdir(parents=True, exist_ok=True)
  for name in arguments.only.split(",") if arguments.only else DIAGRAMS:
    DIAGRAMS[name]().save(out / f"{name}.png")


if __name__ == "__main__":
  main()
