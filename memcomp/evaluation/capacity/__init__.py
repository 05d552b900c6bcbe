"""The number of pairs that a memory can store."""

from memcomp import lazy

__all__ = ["measure", "run"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
