"""memcomp: compressive-memory sequence layers for JAX and TPU."""

from memcomp import lazy

__version__ = "0.1.0"

__all__ = [
  "compiling",
  "config",
  "convert",
  "data",
  "errors",
  "evaluation",
  "export",
  "inference",
  "layers",
  "models",
  "sharding",
  "training",
]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
