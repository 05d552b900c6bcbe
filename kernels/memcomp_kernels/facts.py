"""What a memory computes and what it costs, in words and formulas.

Every op has `facts(spec)`. docs/memories.md is made from them. They describe
the default options, with the numbers of `spec`, and follow the fields that make
another row of the tables: rule, inner model, forget gate, window.
"""

from typing import NamedTuple

LETTERS = {
  "H": "heads",
  "G": "heads of keys and values: H, unless queries share them",
  "d_k": "features of a head's key",
  "d_v": "features of a head's value",
  "m": "slots of a head",
  "C": "tokens of a chunk or segment",
  "W": "tokens of the window",
  "e": "hidden features of the inner MLP per feature of a key",
  "n": "tokens of the sequence",
  "r": "rows in use after n tokens, by a budget or schedule",
  "R": "rows in use, the mean over the n tokens",
  "w": "exact tokens that a token sees, itself included, likewise",
}
"""What stands in `Facts.floats` and `Facts.flops`."""


class Facts(NamedTuple):
  """What a memory computes and costs.

  Texts are lines of Markdown with math in backticks, in the letters of the
  memory's README.

  Attributes:
    objective: what a token's write makes smaller.
    update: the memory after the token, and what is read.
    chunk: what the tokens of a chunk share, if its size is meaning.
    source: paper, arXiv number, equations.
    floats: of one layer's memory, a Python expression of `LETTERS`.
    flops: forward, for one token and layer, likewise; a multiply-add is two.
  """

  objective: str
  update: str
  chunk: str
  source: str
  floats: str
  flops: str
