"""Replaces the attention of a trained model by another memory."""

from memcomp import lazy

__all__ = ["convert", "distill", "swap"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
