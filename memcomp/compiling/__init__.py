"""Resources and operations of a compiled training step, without its devices."""

from memcomp import lazy

__all__ = ["chips", "compile_only", "flops", "program", "report"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
