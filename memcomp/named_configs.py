"""The configs that come with memcomp, by name.

They are in the folder configs/ of a clone, and in memcomp/configs of a wheel.
Each is a self-contained file.
"""

import difflib
import pathlib

from memcomp import errors, paths

_PACKAGE = pathlib.Path(__file__).parent


def folder() -> pathlib.Path:
  """Returns the folder of the configs."""
  installed = _PACKAGE / "configs"
  return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def names() -> list[str]:
  """Returns the names of all configs, sorted."""
  return sorted(path.stem for path in folder().glob("*.py"))


def path_of(value: str) -> str:
  """Returns the path for a value of --config.

  Args:
    value: a path, or a name such as "quickstart"; both may end in `:argument`.

  Raises:
    UserError: the name is unknown.
  """
  value = paths.expand(value)
  name, colon, argument = value.partition(":")
  if "/" in name or "." in name or pathlib.Path(name).is_file():
    return value
  if name in names():
    return f"{folder() / name}.py{colon}{argument}"
  near = difflib.get_close_matches(name, names(), n=1)
  hint = f"did you mean {near[0]}? " if near else ""
  raise errors.UserError(
    f"--config={value}: no config has this name; {hint}names are"
    f" {', '.join(names())}; or give the path of a file"
  )
