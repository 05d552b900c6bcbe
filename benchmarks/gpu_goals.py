"""Goals of the GPU kernels, and what was measured of them."""

from collections.abc import Iterator
from typing import Any

STEPS = {2048: 0.8, 8192: 1.0}
"""By tokens a row: Trellis's tokens a second over softmax attention's."""


def goals(
  rows: Any, device: str, shapes: list[str]
) -> Iterator[tuple[str, float | None, bool]]:
  """Yields what a goal says, what was measured and whether it is reached.

  Args:
    rows: `gpu_rows.Rows`.
    device: whose.
    shapes: names of what forms were timed at.
  """

  def ratio(name: str, above: Any, below: Any) -> float | None:
    found = [
      min(
        (row[name] for key in keys if name in (row := find(**key))),
        default=None,
      )
      for keys in (above, below)
    ]
    return found[0] / found[1] if all(found) else None

  def find(**key: Any) -> dict[str, Any]:
    return rows.find(device=device, **key) or {}

  for shape in shapes:
    at = {"case": "trellis", "shape": shape}
    ours = [at | {"form": "mosaic_gpu"}]
    rival = ratio("both_s", [at | {"form": "fla chunk_gsa"}], ours)
    said = f"Trellis with gradients, {shape}: chunk_gsa's time over it >= 1"
    yield said, rival, bool(rival and rival >= 1)
    xla = ratio("both_s", [at | {"form": "xla_chunked"}], ours)
    said = f"Trellis with gradients, {shape}: the XLA form's time over it <= 3"
    yield said, xla, bool(xla and xla <= 3)
  for length, least in STEPS.items():
    at = {"length": length}
    ours = [at | {"step": "trellis", "form": "mosaic_gpu"}]
    rate = ratio("step_s", [at | {"step": "softmax_attention"}], ours)
    said = f"Trellis 125m, rows of {length}: of attention's tokens/s >= {least}"
    yield said, rate, bool(rate and rate >= least)


def report(rows: Any, device: str, shapes: list[str]) -> None:
  """Prints a table."""
  print("\n| goal | measured | reached |\n|---|---|---|")
  for said, found, reached in goals(rows, device, shapes):
    if found is None:
      print(f"| {said} | not measured | - |")
    else:
      print(f"| {said} | {found:.2f} | {'yes' if reached else 'no'} |")
