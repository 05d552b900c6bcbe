"""Pages of the site that come from outside docs/, and the links to them.

MkDocs calls the functions `on_*`. The README of kernels/, CONTRIBUTING.md and
CHANGELOG.md become pages without a second copy. Their links, and those of
docs/ to them, are written for the repository; here they are turned to the
pages of the site.
"""

import dataclasses
import inspect
import pathlib
import posixpath
import re
from html import unescape
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
  "kernels/README.md": "kernels.md",
  "CONTRIBUTING.md": "contributing.md",
  "CHANGELOG.md": "changelog.md",
}
"""Files of the repository, and the pages that they become."""

SHORT_WORD, SHORT_FORMULA = 40, 24
"""Characters of code, without and with spaces, that fit a line of a phone."""

_SOURCES = {page: source for source, page in PAGES.items()}
_SPAN = re.compile(r"`([^`\n]+)`")
_CODE = re.compile(r"(?<!</span>)<code>([^<]+)</code>")  # not whole blocks
_FLAG = re.compile(r"--[\w.]{1,38}")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
  """Adds the pages that have no file in docs/."""
  pages = {page: (ROOT / source).read_text() for source, page in PAGES.items()}
  pages |= {"api/layers.md": layers_page(), "api/ops.md": ops_page()}
  for page, text in pages.items():
    files.append(File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Turns links between files of the repository to links between pages."""
  here = page.file.src_uri
  folder = posixpath.dirname(_SOURCES.get(here, f"docs/{here}"))

  def turn(link: re.Match) -> str:
    image, text, target, anchor = link.groups()
    if ":" in target:
      return link[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in PAGES:
      path = f"docs/{PAGES[path]}"
    elif not path.startswith("docs/"):
      # A file of the repository that is no page. What is not there stays, and
      # fails the strict build.
      return text if (ROOT / path).exists() else link[0]
    to = posixpath.relpath(path, posixpath.dirname(f"docs/{here}"))
    return f"{image}[{text}]({to}{anchor or ''})"

  return _SPAN.sub(_code_with_bars, _LINK.sub(turn, markdown))


def on_page_content(html: str, **_: Any) -> str:
  """Marks short code and names of flags, which stay in one line."""

  def mark(code: re.Match) -> str:
    text = unescape(code[1])
    room = SHORT_FORMULA if " " in text else SHORT_WORD
    if len(text) > room or ", " in text:  # lists may break
      flags = _FLAG.sub(r'<span class="whole">\g<0></span>', code[1])
      return f"<code>{flags}</code>"
    return f'<code class="whole">{code[1]}</code>'

  return _CODE.sub(mark, html)


def ops_page() -> str:
  """The documentation that `help(op)` prints, for every op."""
  import memcomp_kernels
  from memcomp_kernels import shapes

  ops = {
    op.name: op
    for name in memcomp_kernels.__all__
    if isinstance(op := getattr(memcomp_kernels, name), memcomp_kernels.Op)
  }
  lines = [
    "# Ops",
    "",
    "Each memory is a function of arrays: `from memcomp_kernels import NAME`."
    " [The contract](../kernels.md) says what holds for all of them. This page"
    " is what `help(NAME)` prints, with the shapes of inputs and state. Sizes"
    " such as `num_slots`, and the conditions of the last column, are fields of"
    " the op's `Spec`.",
  ]
  for name, op in ops.items():
    lines += ["", f"## {name}", "", "```text", inspect.getdoc(op), "```"]
    for part in (op.Inputs, op.State):
      lines += ["", f"`{part.__name__}`: {_first_line(part)}", ""]
      lines += ["| field | shape | dtype | present if |", "|---|---|---|---|"]
      lines += [_row(field) for field in shapes.fields(part).values()]
  return "\n".join(lines) + "\n"


def layers_page() -> str:
  """Every mixer with its options, their types and their defaults."""
  from memcomp import layers

  lines = [
    "# Layers",
    "",
    "Each mixer maps `[batch, time, d_model]` to the same shape. It is made by"
    " `NAME(d_model, rngs=rngs, **options)`. `NAMEConfig` takes the same"
    " options, for [models](models.md) and config files. Options without a"
    " meaning here belong to every mixer, or are explained by `help(NAME)`.",
    "",
    "::: memcomp.layers.Mixer",
    "    options:",
    "      members: [__call__, step, init_state, with_stats, from_config]",
    "      heading_level: 2",
  ]
  for name in sorted(layers.__all__, key=str.lower):
    mixer = getattr(layers, name)
    if not (isinstance(mixer, type) and issubclass(mixer, layers.Mixer)):
      continue
    if mixer is layers.Mixer:
      continue
    lines += ["", f"## {name}", "", inspect.getdoc(mixer).split("\n\n")[0], ""]
    lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
    meanings = _attributes(mixer.Config)
    for field in dataclasses.fields(mixer.Config):
      default = field.default
      if default is dataclasses.MISSING:
        factory: Any = field.default_factory
        default = factory()
      kind = getattr(field.type, "__name__", str(field.type))
      cells = (f"`{field.name}`", f"`{kind}`", f"`{default!r}`")
      meaning = meanings.get(field.name, "")
      lines.append("| " + " | ".join((*cells, meaning)) + " |")
  return "\n".join(lines) + "\n"


def _code_with_bars(span: re.Match) -> str:
  r"""Code of a table with `\|`, whose backslash Python-Markdown would show."""
  if r"\|" not in span[1]:
    return span[0]
  text = span[1].replace(r"\|", "|")
  escaped = (c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)
  return f"<code>{''.join(escaped)}</code>"


def _first_line(part: type) -> str:
  return (inspect.getdoc(part) or "").split("\n", 1)[0]


def _row(field: Any) -> str:
  """A field of `Inputs` or `State`: name, shape, dtype and condition."""
  if field.nested is not None:
    shape, dtype = "fields of its own", ""
  else:
    axes = (axis.replace("|", " or ") for axis in field.axes)
    shape, dtype = f"`[{', '.join(axes)}]`", field.dtype or "floating"
  condition = ""
  if field.condition is not None:
    value = field.condition.value
    told = "" if value is None else f"={value!r}"
    condition = f"`{field.condition.attribute}{told}`"
    condition += "" if field.required else ", optional"
  elif field.optional:
    condition = "optional"
  return f"| `{field.name}` | {shape} | {dtype} | {condition} |"


def _attributes(config: type) -> dict[str, str]:
  """The section "Attributes:" of a config class and its bases, by name."""
  found: dict[str, str] = {}
  for base in reversed(config.__mro__):
    text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
    _, _, text = text.partition("Attributes:\n")
    for name, meaning in re.findall(
      r"^  (\w+): (.*(?:\n    .*)*)", text.split("\n\n")[0], re.MULTILINE
    ):
      found[name] = " ".join(meaning.split()).replace("|", "&#124;")
  return found
