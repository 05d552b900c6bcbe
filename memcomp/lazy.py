"""Public modules of a package, imported when they are first used."""

import importlib
import types
from collections.abc import Callable, Sequence


def modules(
  package: str, names: Sequence[str]
) -> tuple[Callable[[str], types.ModuleType], Callable[[], list[str]]]:
  """Returns `__getattr__` and `__dir__` of a package.

  With them `import memcomp` is quick, and `memcomp.data.loader` still needs no
  import of its own.

  Args:
    package: its `__name__`.
    names: its `__all__`.
  """

  def get(name: str) -> types.ModuleType:
    if name in names:
      return importlib.import_module(f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")

  return get, lambda: sorted(names)
