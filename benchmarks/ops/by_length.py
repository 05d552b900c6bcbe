"""The table of what `lengths.py` measured; docs/results has it, too."""

from typing import Any


def table(rows: list[dict[str, Any]], column: str) -> str:
  """Returns a column of the rows by memory and length, as markdown."""
  lengths = sorted({row["length"] for row in rows})
  heads = ["memory", *(f"{n:,}" for n in lengths), "32k / 4k"]
  lines = [heads, ["---"] * len(heads)]
  for memory in dict.fromkeys(row["memory"] for row in rows):
    found = {r["length"]: r[column] for r in rows if r["memory"] == memory}
    ratio = "-"
    if 4096 in found and 32768 in found:
      ratio = f"{found[32768] / found[4096]:.2f}"
    cells = (
      f"{x:#.3g}".rstrip(".") if x < 1000 else f"{x:,}" for x in found.values()
    )
    lines.append([memory, *cells, ratio])
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)
