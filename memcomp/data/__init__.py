"""Tokens from text to batches.

`sources.open_split` gives a `store.TokenStore`, `loader.make_loader` lays it
into rows (`packing`) and hands out `batch.Batch`es; `prepare` writes large
corpora to disk once. Needs numpy and grain; no module here computes with JAX.
"""
