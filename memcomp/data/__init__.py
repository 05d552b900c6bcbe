"""Tokens from text to batches.

`sources.open_split` gives a `store.TokenStore`, `loader.make_loader` lays it
into rows (`packing`) and hands out `batch.Batch`es; `prepare` writes large
corpora to disk once. Needs numpy and grain; no module here computes with JAX.
"""

from memcomp import lazy

__all__ = [
  "batch",
  "loader",
  "packing",
  "prepare",
  "shards",
  "sources",
  "store",
  "synthetic",
  "tokenizer",
]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
