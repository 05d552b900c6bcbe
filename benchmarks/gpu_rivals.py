"""Kernels of flash-linear-attention (Triton, PyTorch), timed as ours are."""

import statistics
from typing import Any


def _gsa(torch, draw, shape):
  from fla.ops.gsa import chunk_gsa

  batch, time, heads, _ = shape
  slots = 64
  gate = torch.nn.functional.logsigmoid(draw(batch, time, heads, slots))
  return chunk_gsa, {
    "s": draw(batch, time, heads, slots),
    "g": gate.to(torch.bfloat16),
  }


def _gated_delta_rule(torch, draw, shape):
  from fla.ops.gated_delta_rule import chunk_gated_delta_rule

  rows = shape[:3]
  return chunk_gated_delta_rule, {
    "g": torch.nn.functional.logsigmoid(draw(*rows).float()),
    "beta": draw(*rows).sigmoid(),
  }


def _simple_gla(torch, draw, shape):
  from fla.ops.simple_gla import chunk_simple_gla

  gate = torch.nn.functional.logsigmoid(draw(*shape[:3]).float())
  return chunk_simple_gla, {"g": gate}


RIVALS = {
  "chunk_gsa": _gsa,
  "chunk_gated_delta_rule": _gated_delta_rule,
  "chunk_simple_gla": _simple_gla,
}


def measure(
  name: str, shape: tuple[int, ...], repeats: int, turn: Any
) -> dict[str, Any]:
  """Times of a rival, by CUDA's events: medians of single calls.

  Args:
    name: of `RIVALS`.
    shape: batch, time, heads, dim.
    repeats: timed calls.
    turn: returns a context in which nobody else uses the GPU.

  Raises:
    NotImplementedError: PyTorch, a GPU for it or flash-linear-attention is
      missing.
  """
  try:
    import fla
    import torch
  except ImportError as error:
    raise NotImplementedError(f"not installed here: {error.name}") from error
  if not torch.cuda.is_available():
    raise NotImplementedError("PyTorch has no GPU here")
  generator = torch.Generator("cuda").manual_seed(0)

  def draw(*size):
    x = torch.randn(*size, generator=generator, device="cuda")
    return x.to(torch.bfloat16)

  function, given = RIVALS[name](torch, draw, shape)
  query, key, value = (draw(*shape) for _ in range(3))
  key = torch.nn.functional.normalize(key, dim=-1)
  given = {"q": query, "k": key, "v": value, **given}
  for x in given.values():
    x.requires_grad_()

  def forward():
    return function(**given)[0]

  def both():
    for x in given.values():
      x.grad = None
    forward().float().sum().backward()

  def seconds(run):
    for _ in range(3):
      run()
    found = []
    with turn():
      for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)

  with torch.no_grad():
    found = {"version": fla.__version__, "forward_s": seconds(forward)}
  try:
    return found | {"both_s": seconds(both)}
  except RuntimeError as error:  # it refuses some releases of Triton
    return found | {"both_s": float("nan"), "backward": str(error)}
