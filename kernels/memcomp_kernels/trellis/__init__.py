"""Trellis: a two-pass key-value compression memory (arXiv 2512.23852)."""

from memcomp_kernels.trellis.api import trellis

__all__ = ["trellis"]
