"""RWKV-7: the delta rule with a decay and a rate of every channel."""

from memcomp_kernels.rwkv7.api import rwkv7

__all__ = ["rwkv7"]
