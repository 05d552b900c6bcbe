"""Another memory in the place of a trained model's attention."""

from memcomp import lazy

__all__ = ["convert", "distill", "swap"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
