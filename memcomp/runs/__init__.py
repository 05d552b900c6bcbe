"""Reads what a run leaves on disk: its folder, config and parameters."""

from memcomp import lazy

__all__ = ["load", "workdir"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
