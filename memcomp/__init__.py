"""memcomp: compressive-memory sequence layers for JAX and TPU.

Packages are imported when they are first used: `import memcomp` itself is
quick, and `memcomp.layers` needs no import of its own.
"""

import importlib
import types

__version__ = "0.1.0"

__all__ = [
  "__version__",
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


def __getattr__(name: str) -> types.ModuleType:
  if name in __all__:
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted(__all__)
