"""The formats of documents: text, or conversations with a chat template."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from memcomp import errors
from memcomp.data import chat_template, text
from memcomp.data import files as files_lib
from memcomp.data import tokenizer as tokenizer_lib

FORMATS = ("text", "messages")

_LIKE = '{"messages": [{"role": "user", "content": "..."}, ...]}'


class Document(NamedTuple):
  """An encoded document.

  Attributes:
    ids: `[tokens]` of the tokenizer's dtype.
    size: byte counts, see `tokenizer.measure`; of a conversation, those of its
      answers.
    spans: first token and end of each answer; empty for text.
  """

  ids: np.ndarray
  size: tuple[int, int, int]
  spans: list[tuple[int, int]]


class Text:
  """Plain text; JSON lines have it in the field "text".

  Attributes:
    tokenizer: tokenizer of the ids.
    template: none; see `Messages`.
  """

  template = None
  parse = staticmethod(text.text_of)

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self.tokenizer = tokenizer

  def check(self, files: Iterable[files_lib.TextFile]) -> None:
    """Any file may have text."""

  def encode(self, where: str, content: Any) -> Document:
    """Returns the document of the bytes of a text."""
    ids = self.tokenizer.encode_bytes(content)
    return Document(ids, tokenizer_lib.measure(self.tokenizer, ids), [])


class Messages:
  """Conversations: JSON lines with the field "messages".

  Attributes:
    tokenizer: tokenizer of the ids.
    template: template of conversations, whose answers alone count.
  """

  def __init__(
    self, tokenizer: tokenizer_lib.Tokenizer, template: chat_template.Template
  ):
    self.tokenizer = tokenizer
    self.template = template

  def check(self, files: Iterable[files_lib.TextFile]) -> None:
    """Raises UserError for a file that cannot have conversations."""
    for file in files:
      if not file.is_jsonl:
        raise errors.UserError(
          f"{file.path}: data.format = messages reads .jsonl, a conversation in"
          f" each line ({_LIKE}); leave this file out"
        )

  def parse(self, where: str, record: Any) -> list[chat_template.Message]:
    """Returns the messages of a JSON line; raises UserError naming `where`."""
    listed = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(listed, list) or not listed:
      raise errors.UserError(
        f'{where}: no field "messages" holding a list; each line must be an'
        f" object such as {_LIKE}"
      )
    _check_unknown(where, record, ("tools",))
    found = [
      _message(f"{where}: messages[{i}]", x) for i, x in enumerate(listed)
    ]
    if all(message.role != "assistant" for message in found):
      raise errors.UserError(
        f"{where}: no message of the assistant, so that there is nothing to"
        " learn; remove this line"
      )
    return found

  def encode(self, where: str, content: Any) -> Document:
    """Returns the document of messages; raises UserError naming `where`."""
    try:
      parts = self.template.parts(content)
    except errors.UserError as error:
      raise errors.UserError(f"{where}: {error}") from error
    encoded = [self.tokenizer.encode(part.text) for part in parts]
    ends = np.cumsum([len(ids) for ids in encoded]).tolist()
    # Of the answers alone: marks that are special tokens spell nothing, and the
    # length of a question must not change the bytes of its answer.
    sizes = [
      tokenizer_lib.measure(self.tokenizer, ids)
      for part, ids in zip(parts, encoded, strict=True)
      if part.is_answer
    ]
    return Document(
      np.concatenate(encoded),
      tuple(np.sum(sizes, axis=0).tolist()),
      [
        (end - len(ids), end)
        for part, ids, end in zip(parts, encoded, ends, strict=True)
        if part.is_answer and len(ids)
      ],
    )


Format = Text | Messages


def check(format: str, template: str) -> None:
  """Checks the arguments of `load`, without opening anything.

  Raises:
    UserError: the format is unknown, or text has a template.
  """
  if format not in FORMATS:
    raise errors.UserError(
      f"data.format: unknown {format!r}; use one of {', '.join(FORMATS)}"
    )
  if format == "text" and template != chat_template.CHATML:
    raise errors.UserError(
      f"data.chat_template = {template!r} means nothing to text; set"
      " data.format to messages, or leave it out"
    )


def load(
  format: str, template: str, tokenizer: tokenizer_lib.Tokenizer
) -> Format:
  """Returns a format.

  Args:
    format: one of `FORMATS`.
    template: argument of `chat_template.load`, for "messages".
    tokenizer: tokenizer of the ids.

  Raises:
    UserError: see `check` and `chat_template.load`.
  """
  check(format, template)
  if format == "text":
    return Text(tokenizer)
  return Messages(tokenizer, chat_template.load(template))


def _check_unknown(
  where: str, record: dict[str, Any], keys: tuple[str, ...]
) -> None:
  """Refuses what would change the text or what is learned from it."""
  for key in keys:
    if record.get(key) not in (None, [], 1):
      raise errors.UserError(
        f"{where}: the field {key!r} is not supported; remove the field if the"
        " conversation is complete without it, else remove this line"
      )


def _message(where: str, record: Any) -> chat_template.Message:
  """Returns a checked message."""
  if not isinstance(record, dict):
    record = {}
  role, content = record.get("role"), record.get("content")
  if role not in chat_template.ROLES:
    raise errors.UserError(
      f"{where}: role {role!r} is unknown; it must be one of"
      f" {', '.join(chat_template.ROLES)}"
    )
  if not isinstance(content, str):
    raise errors.UserError(
      f"{where}: the content of role {role} is no string but"
      f" {type(content).__name__}; write its text, or remove this line"
    )
  if role == "assistant" and not content.strip():
    raise errors.UserError(
      f"{where}: the assistant says nothing; write an answer, or remove this"
      " line"
    )
  _check_unknown(where, record, ("weight", "tool_calls", "function_call"))
  try:
    content.encode()
  except UnicodeEncodeError as error:
    raise errors.UserError(
      f"{where}: the content has half of a surrogate pair, which has no UTF-8"
      " form; remove it"
    ) from error
  return chat_template.Message(role, content)
