"""Exports models for other programs, and imports theirs."""

from memcomp import lazy

__all__ = ["huggingface", "names", "read", "write"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
