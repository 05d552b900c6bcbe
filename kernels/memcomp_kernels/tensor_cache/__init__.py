"""Tensor Cache: a window beside a decayed memory (arXiv 2605.22884)."""
