"""Softmax attention over all tokens, or a window of them (the baseline)."""

from memcomp_kernels.softmax_attention.api import softmax_attention

__all__ = ["softmax_attention"]
