"""The data pipeline, from text to batches of tokens.

`sources.open_split` returns a `store.TokenStore`. `loader.make_loader` packs it
into rows (`packing`) and yields `batch.Batch`es. `prepare` writes large corpora
to disk once. It needs numpy and grain; no module here computes with JAX.
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
