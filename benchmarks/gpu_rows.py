"""Rows that `gpu.py` measures: kept in a file, printed as a table."""

import json
import pathlib
import traceback
from typing import Any


class Rows:
  """Rows in a file, by what identifies them."""

  def __init__(self, path: str):
    self.path = pathlib.Path(path) if path else None
    self.rows = []
    if self.path and self.path.exists():
      lines = self.path.read_text().splitlines()
      self.rows = [json.loads(line) for line in lines]

  def find(self, **key: Any) -> dict[str, Any] | None:
    """The row of `key`, if there is one."""
    items = key.items()
    return next((row for row in self.rows if items <= row.items()), None)

  def make(self, make: Any, **key: Any) -> dict[str, Any]:
    """The row of `key`, made unless it is there; says which."""
    if (row := self.find(**key)) is None:
      print(" ".join(map(str, key.values())), "...", flush=True)
      try:
        row = key | make()
      except Exception as error:  # of one form; the others are measured
        if not isinstance(error, NotImplementedError):
          traceback.print_exc()
        lines = str(error).splitlines() or [""]
        row = key | {"error": f"{type(error).__name__}: {lines[0]}"[:200]}
      self.rows.append(row)
      if self.path:
        with self.path.open("a") as file:
          print(json.dumps(row), file=file)
    return row


def table(rows: list[dict[str, Any]], top: dict[str, float]) -> None:
  """Prints times, shares of the ceilings, and ratios to the XLA form."""
  print(
    f"\nceilings: {top['flops'] / 1e12:.1f} Tflop/s (bfloat16 product),"
    f" {top['bytes'] / 1e9:.0f} GB/s (copy)\n"
  )
  print(
    "| case | shape | form | forward, ms | with gradients, ms | Tflop/s |"
    " of ceiling | GB/s | of ceiling | XLA form's time over it |"
  )
  print("|---|---|---|---|---|---|---|---|---|---|")
  xla = {
    (row["case"], row["shape"]): row
    for row in rows
    if row["form"] == "xla_chunked"
  }
  for row in rows:
    start = f"| {row['case']} | {row['shape']} | {row['form']} |"
    if "error" in row:
      print(f"{start} {row['error']} |")
      continue
    base = xla.get((row["case"], row["shape"]), row)
    rate, moved = (
      base.get(name, float("nan")) / row["forward_s"]
      for name in ("flops", "bytes")
    )
    faster = base.get("both_s", float("nan")) / row["both_s"]
    print(
      f"{start} {1e3 * row['forward_s']:.3f} | {1e3 * row['both_s']:.3f} |"
      f" {rate / 1e12:.2f} | {rate / top['flops']:.1%} | {moved / 1e9:.0f} |"
      f" {moved / top['bytes']:.1%} | {faster:.2f} |"
    )
