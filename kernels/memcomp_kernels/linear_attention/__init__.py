"""Linear attention (arXiv 2006.16236), with a decay if asked for."""

from memcomp_kernels.linear_attention.api import linear_attention

__all__ = ["linear_attention"]
