"""Key-Value Means: an expandable block-recurrent memory (arXiv 2605.09877)."""

from memcomp_kernels.key_value_means.api import key_value_means

__all__ = ["key_value_means"]
