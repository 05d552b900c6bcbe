"""Tensor Cache: a window beside a decayed memory (arXiv 2605.22884)."""

from memcomp_kernels.tensor_cache.api import tensor_cache

__all__ = ["tensor_cache"]
