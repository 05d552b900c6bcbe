"""What a compiled training step will need and do, without its devices."""

from memcomp import lazy

__all__ = ["chips", "compile_only", "flops", "program", "report"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
