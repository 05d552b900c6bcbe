"""Infini-attention (arXiv 2404.07143): local attention and linear memory."""

from memcomp_kernels.infini_attention.api import infini_attention

__all__ = ["infini_attention"]
