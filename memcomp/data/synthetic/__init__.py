"""Synthetic tasks as plain functions that return arrays."""

from memcomp import lazy

__all__ = ["mqar", "mqar_task", "niah", "niah_task", "recall", "task", "tasks"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
