"""What a memory computes and what it costs, in words and formulas.

Every op has `facts(spec)`. docs/memories.md and the tables of the memories'
pages are generated from them, and layers compute their costs by the formulas.
The words describe the default options, with the numbers of `spec`. They depend
on those fields of `spec` that make another row of the tables: rule, inner
model, forget gate, window. The formulas hold for every `spec`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

LETTERS = {
  "H": "heads",
  "G": "heads of keys and values: H, unless queries share them",
  "d_k": "features of a head's key",
  "d_v": "features of a head's value",
  "m": "slots of a head",
  "C": "tokens of a chunk or segment that share its start; 0 if none do",
  "W": "tokens of the window",
  "e": "hidden features of the inner MLP per feature of a key",
  "n": "tokens of the sequence",
  "r": "rows in use after n tokens, by a budget or schedule",
  "R": "rows in use; the mean over the n tokens",
  "w": "tokens that a token sees exactly, itself included; the mean",
}
"""Meaning of the letters in `Facts.floats` and `Facts.flops`."""


class Facts(NamedTuple):
  """What a memory computes and costs.

  The texts are lines of Markdown with math in backticks. They use the letters
  of the memory's page in docs.

  Attributes:
    objective: the loss that a token's write reduces. The recurrence is on the
      memory's page.
    chunk: what the tokens of a chunk share, if the chunk's size changes
      results.
    source: paper, arXiv number, equations.
    floats: number of floats in one layer's memory, as a Python expression of
      `LETTERS`.
    flops: forward FLOPs per token and layer, the mean over the sequence, as a
      Python expression of `LETTERS`. A multiply-add counts as two.
    letters: n -> the letters of both expressions that follow from the options
      and n.
  """

  objective: str
  chunk: str
  source: str
  floats: str
  flops: str
  letters: Callable[[int], Mapping[str, float]] = lambda n: {}


def cost(formula: str, letters: Mapping[str, float]) -> int:
  """Returns the value of `Facts.floats` or `Facts.flops`, rounded."""
  return round(eval(formula, {"__builtins__": {}, "min": min}, dict(letters)))


def tokens_seen(n: int, window: int, chunk: int = 1) -> float:
  """Returns how many of `n` tokens each sees in a window, in the mean.

  The window moves by whole chunks. The token at position p sees itself and
  tokens before it, from max(0, (p // chunk + 1) * chunk - window) on.
  """
  if not n:
    return 0.0
  whole, rest = divmod(n, chunk)
  first = min(window // chunk, whole)  # chunks that see all before them
  missed = chunk * (whole * (whole + 1) - first * (first + 1)) // 2
  missed = chunk * (missed - window * (whole - first))
  missed += rest * max(0, (whole + 1) * chunk - window)
  return (n + 1) / 2 - missed / n
