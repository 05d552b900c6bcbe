"""How many pairs a memory holds."""

from memcomp import lazy

__all__ = ["measure", "run"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
