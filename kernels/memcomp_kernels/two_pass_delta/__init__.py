"""Two-pass delta rule: keys, then values, compressed by regression."""

from memcomp_kernels.two_pass_delta.api import two_pass_delta

__all__ = ["two_pass_delta"]
