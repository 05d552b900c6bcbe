"""Models as files that other programs read, and theirs as ours."""

from memcomp import lazy

__all__ = ["huggingface", "names", "read", "write"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
