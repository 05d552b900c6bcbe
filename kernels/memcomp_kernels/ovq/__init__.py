"""Online vector quantisation: a growing dictionary of key-value means."""

from memcomp_kernels.ovq.api import ovq

__all__ = ["ovq"]
