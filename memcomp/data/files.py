"""Finds the text files of a source: files, folders, globs, the library."""

import collections
import dataclasses
import fnmatch
import functools
import glob
import os
import pathlib
import stat
import sysconfig
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from memcomp import errors

EXTENSIONS = (".txt", ".md", ".py", ".jsonl")
COMPRESSIONS = ("", ".gz", ".zst")

# Besides tests: `encodings` repeats one table many times, `pydoc_data` is a
# generated text, `_sysconfigdata*` contains paths of the build machine.
_NOT_LIBRARY = {
  "test",
  "tests",
  "idle_test",
  "encodings",
  "pydoc_data",
  "site-packages",
  "dist-packages",
  "__pycache__",
}

_RUN = {"config.json", "metrics.jsonl"}
"""What the folder of a run has."""


@dataclasses.dataclass(frozen=True)
class TextFile:
  """A text file.

  Attributes:
    name: path relative to the folder or pattern of the source; it determines
      the split of the file's documents.
    path: path of the file.
  """

  name: str
  path: str

  @property
  def extension(self) -> str:
    """The extension in lower case, such as ".jsonl.gz"."""
    return _extension(self.path)

  @property
  def is_jsonl(self) -> bool:
    """Whether each line is a separate document."""
    return self.extension.startswith(".jsonl")


def find_all(
  sources: Iterable[str],
  names: dict[Hashable, str] | None = None,
  *,
  field: str = "data.source",
) -> list[TextFile]:
  """Lists the text files of several sources, in the order of the sources.

  A file in several sources, also through links, counts once, for the first.

  Args:
    sources: see `find`.
    names: names of the files of earlier calls; this call adds its files. A file
      keeps its first name, so that it stays in one split.
    field: see `find`.

  Raises:
    UserError: see `find`.
  """
  names = {} if names is None else names
  files = {}
  for source in sources:
    for file in find(source, field):
      key = _identity(file.path)
      name = names.setdefault(key, file.name)
      files.setdefault(key, TextFile(name, file.path))
  return list(files.values())


def find(source: str, field: str = "data.source") -> list[TextFile]:
  """Lists the text files of a source, sorted by name, each once.

  Args:
    source: "stdlib", a file, a folder (with sub-folders and links, but without
      hidden ones and those of runs) or a glob.
    field: the field or flag that holds the source, for the error.

  Raises:
    UserError: nothing found, an unknown extension, an unreadable folder, a
      broken link, or something that is not a file.
  """
  if source == "stdlib":
    return _find_stdlib()
  if os.path.isdir(source):
    found = _text_files(source, _match(source, ["**"]))
    if not found:
      raise errors.UserError(
        f"{source}: no text files in this folder; it needs "
        f"{', '.join(EXTENSIONS)} (also .gz or .zst)"
      )
    return found
  if os.path.exists(source):
    if not _extension(source):
      raise errors.UserError(
        f"{source}: unknown extension; rename it to one of "
        f"{', '.join(EXTENSIONS)} (also .gz or .zst) or .bin"
      )
    if not os.path.getsize(source):
      raise errors.UserError(f"{source}: the file is empty; give one with text")
    return [TextFile(os.path.basename(source), source)]
  if glob.has_magic(source):
    return _find_glob(source)
  raise errors.UserError(f"{source}: {_why_missing(source)}; check {field}")


def _why_missing(path: str) -> str:
  try:
    os.stat(path)
  except FileNotFoundError:
    pass
  except (OSError, ValueError) as error:  # ValueError for a null byte
    return f"cannot read ({getattr(error, 'strerror', None) or error})"
  return "no such file or folder"


def _find_glob(pattern: str) -> list[TextFile]:
  parts = pathlib.PurePath(pattern).parts
  fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
  base = os.path.join("", *parts[:fixed])
  found = _text_files(base, _match(base, parts[fixed:]))
  if not found:
    raise errors.UserError(
      f"{pattern}: matches no text file; check the pattern (extensions "
      f"{', '.join(EXTENSIONS)}, also .gz or .zst)"
    )
  return found


def _find_stdlib() -> list[TextFile]:
  root = sysconfig.get_paths()["stdlib"]
  paths = (
    os.path.join(folder, name)
    for folder in _folders(root, _NOT_LIBRARY, follow=False)
    for name in _names(folder)
    if name.endswith(".py") and not name.startswith((".", "_sysconfigdata"))
  )
  found = _text_files(root, filter(_is_utf8, paths))
  if not found:
    raise errors.UserError(
      f"source stdlib: no library sources in {root}; install the interpreter "
      "with its sources, or give text files"
    )
  return found


def _is_utf8(path: str) -> bool:
  try:
    pathlib.Path(path).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError):
    return False
  return True


def _match(folder: str, parts: Sequence[str]) -> Iterator[str]:
  """Yields the matches of a glob's parts below a folder; raises UserError.

  Unlike `glob.glob`, an unreadable folder is an error, and ** visits each
  folder once.
  """
  part, *rest = parts
  if part == "**":
    for below in _folders(folder):
      yield from _match(below, rest or ["*"])
    return
  names = [part]
  if glob.has_magic(part):
    names = fnmatch.filter(_names(folder), part)
    if not part.startswith("."):
      names = [name for name in names if not name.startswith(".")]
  for name in names:
    path = os.path.join(folder, name)
    if not os.path.lexists(path):
      continue  # a part without wildcards
    if not rest:
      yield path
    elif _is_folder(path):
      yield from _match(path, rest)


def _folders(
  root: str, skip: Collection[str] = (), *, follow: bool = True
) -> Iterator[str]:
  """Yields a folder and those below it, each once despite links.

  Args:
    root: folder to start from.
    skip: names of folders to skip; hidden ones and those of runs, whose logs
      are no text to train on, are always skipped.
    follow: whether to follow links.
  """
  seen, folders, links = set(), collections.deque([root]), collections.deque()
  # Links come last, so that folders in the tree keep their names there.
  while waiting := folders or links:
    folder = waiting.popleft()
    real = os.path.realpath(folder)
    if real in seen:
      continue
    names = _names(folder)
    if folder != root and set(names) >= _RUN:
      continue
    seen.add(real)
    yield folder
    for name in names:
      path = os.path.join(folder, name)
      if name.startswith(".") or name in skip:
        continue
      if not os.path.islink(path):
        folders += [path] if _is_folder(path) else []
      elif follow:
        links += [path] if _is_folder(path) else []


def _names(folder: str) -> list[str]:
  """Returns the sorted names in a folder; none if it is not a folder."""
  try:
    return sorted(os.listdir(folder or "."))
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    raise errors.UserError(
      f"{folder}: cannot read this folder ({error.strerror}); change its"
      " permissions, or name only what can be read"
    ) from error


def _text_files(base: str, found: Iterable[str]) -> list[TextFile]:
  """Returns the text files among `found` below `base`, sorted, each once."""
  real = functools.cache(os.path.realpath)
  places: dict[Hashable, tuple[bool, int, str, str]] = {}
  for path in found:
    if not _extension(path) or _is_folder(path):
      continue
    name = os.path.relpath(path, base or ".").replace(os.sep, "/")
    # Prefer paths without links, then short paths.
    there = os.path.normpath(
      os.path.join(real(base or "."), os.path.dirname(name))
    )
    linked = os.path.islink(path) or real(os.path.dirname(path) or ".") != there
    place = linked, name.count("/"), name, path
    key = _identity(path)
    places[key] = min(place, places.get(key, place))
  files = [TextFile(name, path) for *_, name, path in places.values()]
  return sorted(files, key=lambda file: file.name)


def _identity(path: str) -> Hashable:
  """Returns a key that is equal for all names of a file.

  Raises:
    UserError: it does not exist, or is not a regular file.
  """
  found = _stat(path)
  if not stat.S_ISREG(found.st_mode):
    raise errors.UserError(
      f"{path}: no regular file; leave it out of the source"
    )
  # Some file systems have no file numbers.
  return (
    (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(path)
  )


def _is_folder(path: str) -> bool:
  return stat.S_ISDIR(_stat(path).st_mode)


def _stat(path: str) -> os.stat_result:
  try:
    return os.stat(path)
  except OSError as error:
    what = (
      "a link that leads nowhere" if os.path.islink(path) else "cannot read"
    )
    raise errors.UserError(
      f"{path}: {what} ({error.strerror}); mend it, or leave it out of the"
      " source"
    ) from error


def _extension(path: str) -> str:
  """Returns the extension of a text file in lower case; "" for others."""
  path = path.lower()
  known = (e + c for e in EXTENSIONS for c in COMPRESSIONS)
  return next((e for e in known if path.endswith(e)), "")
