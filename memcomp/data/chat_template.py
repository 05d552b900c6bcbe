"""Chat templates: how a conversation is written as one text.

Training and `inference.chat` share the templates, so a model is asked exactly
as it was trained. A template is "chatml", which is defined here, or a
tokenizer's Jinja template, which needs the extra `text`. It has to write each
answer behind what it writes without that answer.
"""

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from memcomp import errors, paths
from memcomp.data import store as store_lib

CHATML = "chatml"
"""Name of the template that needs no file."""

ROLES = ("system", "user", "assistant")

_CONFIG = "tokenizer_config.json"
_BESIDE = "chat_template.jinja"  # newer tokenizers keep it in its own file
_QUESTION, _ANSWER = "a question", "the answer to it"


class Message(NamedTuple):
  """What one side says.

  Attributes:
    role: one of `ROLES`.
    content: the text.
  """

  role: str
  content: str


class Passage(NamedTuple):
  """A piece of a conversation's text, which is tokenized on its own.

  Attributes:
    text: the text.
    is_answer: whether the assistant wrote it; the loss counts only these.
  """

  text: str
  is_answer: bool


class _Render(Protocol):
  """Returns the text of messages; `prompt` adds the head of an answer."""

  def __call__(self, messages: Sequence[Message], *, prompt: bool) -> str: ...


class Template:
  """A chat template.

  Attributes:
    spec: its definition for JSON, see `of_spec`.
    fingerprint: 16 hex digits; equal for equal definitions.
    end: text behind an answer: perhaps a space, then `stop`, then `rest`.
    stop: text that ends an answer, which the model learns to write.
    rest: text between `stop` and the next message, which it does not.
  """

  def __init__(self, spec: dict[str, Any], render: _Render):
    """Wraps a function.

    Raises:
      UserError: nothing marks the end of an answer.
    """
    self.spec = spec
    self.fingerprint = store_lib.digest(json.dumps(spec, sort_keys=True))
    self._render = render
    probe = [Message("user", _QUESTION), Message("assistant", _ANSWER)]
    _, found, self.end = render(probe, prompt=False).rpartition(_ANSWER)
    if not found or not self.end:
      raise errors.UserError(
        "the chat template writes nothing behind an answer, so that a model"
        " cannot learn to end one; use another template"
      )
    self.stop = self.end.strip() or self.end
    self.rest = self.end.partition(self.stop)[2]

  def parts(self, messages: Sequence[Message]) -> list[Passage]:
    """Splits the text of a conversation at the edges of its answers.

    An answer's part ends with `stop`. Parts are not empty.

    Raises:
      UserError: a content has `stop` in it, the template refuses the messages,
        or an answer changes the text before it.
    """
    for number, message in enumerate(messages):
      self._check(message, f"messages[{number}]")
    found, written, done = [], "", 0
    for number, message in enumerate(messages):
      if message.role != "assistant":
        continue
      asked = self._render(messages[:number], prompt=True)
      answered = self._render(messages[: number + 1], prompt=False)
      _check_prefix(written, asked, number)
      _check_prefix(asked, answered, number)
      if not answered[len(asked) :].endswith(self.end):
        raise errors.UserError(
          f"the chat template ends messages[{number}] otherwise than with"
          f" {self.end!r}; use another template"
        )
      stop = len(answered) - len(self.rest)
      found.append(Passage(asked[done:], is_answer=False))
      found.append(Passage(answered[len(asked) : stop], is_answer=True))
      written, done = answered, stop
    whole = self._render(messages, prompt=False)
    _check_prefix(written, whole, len(messages) - 1)
    found.append(Passage(whole[done:], is_answer=False))
    return [part for part in found if part.text]

  def ask(self, said: Sequence[Message], content: str) -> str:
    """Returns the text from the last answer's `end` to the next answer.

    Args:
      said: messages so far.
      content: the user's next message.

    Raises:
      UserError: see `parts`.
    """
    new = Message("user", content)
    self._check(new, "the message")
    asked = self._render([*said, new], prompt=True)
    if not any(message.role == "assistant" for message in said):
      return asked
    written = self._render(said, prompt=False)
    _check_prefix(written, asked, len(said))
    return asked[len(written) :]

  def _check(self, message: Message, name: str) -> None:
    if self.stop in message.content:
      raise errors.UserError(
        f"{name} ({message.role}) has {self.stop!r} in it, which ends an answer"
        " in the chat template; remove it"
      )


def load(name: str) -> Template:
  """Opens a template.

  Args:
    name: "chatml", or a tokenizer_config.json or its folder.

  Raises:
    UserError: no such file, no template in it, or a library is missing.
  """
  if name == CHATML:
    return of_spec({"name": CHATML})
  path = paths.of(paths.expand(name))
  if path.is_dir():
    path /= _CONFIG
  beside = path.parent / _BESIDE
  try:
    found = paths.read_json(path, f"give {CHATML}, or the path of a {_CONFIG}")
    spec = _spec(found, beside)
  except OSError as error:
    raise errors.UserError(
      f"cannot read chat template {name}: {error.strerror or error}; give"
      f" {CHATML}, or the path of a {_CONFIG}"
    ) from error
  if spec is None:
    raise errors.UserError(
      f"{os.fspath(path)}: no chat_template in it; give {CHATML}, or the"
      " tokenizer of a model that chats"
    )
  try:
    return of_spec(spec)
  except errors.UserError as error:
    used = beside if beside.exists() else path
    raise errors.UserError(f"{os.fspath(used)}: {error}") from error


def spec_in(folder: str | os.PathLike) -> dict[str, Any] | None:
  """Returns the `Template.spec` of a tokenizer's folder; None without one.

  It is not compiled, so that a model opens without the library.

  Raises:
    UserError: one of its files is damaged.
  """
  path = paths.of(folder) / _CONFIG
  found = {}
  if path.exists():
    found = paths.read_json(path, "restore it from a copy")
  return _spec(found, path.parent / _BESIDE)


def _spec(found: dict[str, Any], beside: Any) -> dict[str, Any] | None:
  source = _source(found, beside)
  tokens = {
    key: value.get("content") if isinstance(value, dict) else value
    for key, value in found.items()
    if key.endswith("_token")
  }
  tokens = {k: v for k, v in tokens.items() if isinstance(v, str)}
  spec = {"name": "jinja", "source": source, "tokens": tokens}
  return spec if source else None


def of_spec(spec: dict[str, Any]) -> Template:
  """Returns the template of a `Template.spec`.

  Raises:
    UserError: it is broken, or a library is missing.
  """
  with errors.malformed("the chat template", "restore it from a copy"):
    if spec["name"] == CHATML:
      return Template(spec, _chatml)
    source, tokens = str(spec["source"]), dict(spec["tokens"])
  return Template(spec, functools.partial(_jinja, _compiled(source), tokens))


def _chatml(messages: Sequence[Message], *, prompt: bool) -> str:
  turns = [f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages]
  return "".join(turns) + "<|im_start|>assistant\n" * prompt


def _jinja(
  render: Callable[..., str],
  tokens: dict[str, str],
  messages: Sequence[Message],
  *,
  prompt: bool,
) -> str:
  try:
    return render(
      messages=[message._asdict() for message in messages],
      tools=None,
      documents=None,
      add_generation_prompt=prompt,
      **tokens,
    )
  except Exception as error:  # whatever the template's expressions raise
    # Not defined, so that a template that looks for it writes its own date.
    if str(error) == "'strftime_now' is undefined":
      raise errors.UserError(
        "the chat template writes today's date (strftime_now), so that texts"
        " would differ from day to day; write a fixed date in its place"
      ) from error
    raise errors.UserError(
      f"the chat template refuses these messages ({_one_line(error)}); change"
      " them, or use another template"
    ) from error


def _compiled(source: str) -> Callable[..., str]:
  """Compiles a template as transformers does, but without today's date."""
  try:
    import jinja2
    from jinja2 import ext, nodes, sandbox
  except ImportError as error:
    raise errors.UserError(
      "a chat template of a tokenizer needs the library jinja2: pip install"
      " 'memcomp[text]'"
    ) from error

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  class Generation(ext.Extension):
    """`{% generation %}`, which marks answers and writes what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Any) -> nodes.Node:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      return nodes.Scope(body, lineno=line)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[ext.LoopControlExtension, Generation],
  )
  environment.filters["tojson"] = to_json
  try:
    return environment.from_string(
      source, globals={"raise_exception": refuse}
    ).render
  except Exception as error:
    raise errors.UserError(
      f"the chat template is no Jinja template ({_one_line(error)}); correct it"
    ) from error


def _source(config: dict[str, Any], beside: Any) -> str:
  """Returns the template of a tokenizer_config.json; "" if it has none.

  A file beside it comes first, as in transformers.
  """
  if beside.exists():
    text = beside.read_bytes()
    with errors.malformed(os.fspath(beside), "restore it from a copy"):
      return text.decode()
  found = config.get("chat_template")
  if isinstance(found, list):  # several, by name
    named = [x for x in found if isinstance(x, dict)]
    found = {x.get("name"): x.get("template") for x in named}.get("default")
  return found if isinstance(found, str) else ""


def _check_prefix(before: str, after: str, number: int) -> None:
  if not after.startswith(before):
    raise errors.UserError(
      f"the chat template writes what stands before messages[{number}]"
      " otherwise when more messages follow, so that answers cannot be told"
      " apart; use another template"
    )


def _one_line(error: Exception) -> str:
  return " ".join(str(error).split()) or type(error).__name__
