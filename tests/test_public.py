"""Packages say what is public, and cost nothing to import."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

import memcomp

ROOT = pathlib.Path(__file__).parents[1]
# Those that are made of modules; memcomp.layers and memcomp.models export
# classes.
PACKAGES = sorted(
  ".".join(path.parent.relative_to(ROOT).parts)
  for path in (ROOT / "memcomp").rglob("__init__.py")
  if path.parent.name not in ("layers", "models")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_modules_exist(package):
  module = importlib.import_module(package)
  assert module.__doc__
  assert module.__all__ == sorted(set(module.__all__)) == dir(module)
  for name in module.__all__:
    assert importlib.util.find_spec(f"{package}.{name}"), name


def test_modules_need_no_import_of_their_own():
  assert memcomp.data.batch is importlib.import_module("memcomp.data.batch")
  with pytest.raises(AttributeError, match=r"'memcomp.data' has no attribute"):
    _ = memcomp.data.nothing


def test_importing_packages_is_quick():
  program = f"import sys, {', '.join(PACKAGES)}; print(*sys.modules)"
  paths = [str(ROOT), str(ROOT / "kernels")]
  done = subprocess.run(
    # Without site-packages, whose .pth files import on their own.
    [sys.executable, "-S", "-c", f"import sys; sys.path += {paths}; {program}"],
    capture_output=True,
    text=True,
    check=True,
  )
  loaded = {name.partition(".")[0] for name in done.stdout.split()}
  assert loaded - sys.stdlib_module_names <= {"__main__", "memcomp"}
