"""Packages say what is public, and cost nothing to import."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

import memcomp

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = sorted(
  ".".join(path.parent.relative_to(ROOT).parts)
  for path in (ROOT / "memcomp").rglob("__init__.py")
)
# What they export are functions and classes, which need JAX.
EAGER = ("memcomp.layers", "memcomp.models", "memcomp.sharding")
QUICK = [package for package in PACKAGES if package not in EAGER]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_public_exists(package):
  module = importlib.import_module(package)
  assert module.__doc__ and module.__all__
  assert len(set(module.__all__)) == len(module.__all__)
  for name in module.__all__:
    if package in EAGER:
      assert hasattr(module, name), name
    else:
      assert importlib.util.find_spec(f"{package}.{name}"), name


def test_modules_need_no_import_of_their_own():
  assert memcomp.data.batch is importlib.import_module("memcomp.data.batch")
  with pytest.raises(AttributeError, match=r"'memcomp.data' has no attribute"):
    _ = memcomp.data.nothing


def test_importing_packages_is_quick():
  program = f"import sys, {', '.join(QUICK)}; print(*sys.modules)"
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
