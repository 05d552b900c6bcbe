"""Trellis: a two-pass key-value compression memory (arXiv 2512.23852)."""
