"""Lazy imports of the public modules of a package."""

import importlib
import types
from collections.abc import Callable, Sequence


def modules(
  package: str, names: Sequence[str]
) -> tuple[Callable[[str], types.ModuleType], Callable[[], list[str]]]:
  """Returns `__getattr__` and `__dir__` of a package.

  They make `import memcomp` fast, while `memcomp.data.loader` still needs no
  separate import.

  Args:
    package: the package's `__name__`.
    names: the package's `__all__`.
  """

  def get(name: str) -> types.ModuleType:
    if name in names:
      return importlib.import_module(f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")

  return get, lambda: sorted(names)
