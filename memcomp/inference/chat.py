"""A conversation in a terminal: the model reads each line and continues.

The text alternates between typed lines, each with a line break, and answers.
There are no other markers. A session is a value, so undoing a turn means
returning to the previous one.
"""

import collections
import contextlib
import dataclasses
import importlib
import pathlib
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memcomp import errors, limits, paths
from memcomp.inference import (
  contents,
  generate,
  prefill,
  sample,
  saved,
  stop,
  terminal,
)
from memcomp.inference import session as session_lib

_UNDO = 8
"""Maximum number of turns to undo; each keeps a state."""

HELP = """\
Type a line: the model reads it and continues. An empty line only continues.
Ctrl-C stops an answer; the model remembers what it has shown.
  /read FILE        read a text file, of any length
  /state            what the memories contain
  /save FOLDER      keep the session on disk
  /load FOLDER      continue a saved session
  /undo             forget the last turn
  /new              forget everything
  /set NAME=VALUE   tokens, temperature, top_k, top_p, min_p, seed,
                    repetition_penalty, or stop (a text; none: stop=)
  /quit             leave (Ctrl-D)"""


class Chat:
  """One conversation.

  Attributes:
    session: the text that the model has read so far.
    stops: what ends an answer, or None.
  """

  def __init__(
    self,
    owner: saved.Owner,
    *,
    tokens: int,
    settings: sample.Settings,
    stop_strings: Sequence[str] = (),
    ask: Callable[[str], str] | None = None,
  ):
    """Starts with an empty text.

    Args:
      owner: the model.
      tokens: maximum length of an answer.
      settings: sampling settings.
      stop_strings: texts that end an answer; they are read, but not shown.
      ask: shows a prompt and returns a line, or raises EOFError at the end;
        default `input`.

    Raises:
      UserError: a stop string is empty, or `tokens` is below 1.
    """
    self._owner = owner
    limits.check("tokens", tokens)
    self._tokens = tokens
    self._settings = settings
    self.stops = self._make_stops(stop_strings)
    self._ask = ask or input
    self._before = collections.deque[session_lib.Session](maxlen=_UNDO)
    self.session = session_lib.start(owner.model)

  def run(self, opening: str = "") -> None:
    """Runs the conversation until the end of the input.

    Args:
      opening: text to read first.
    """
    with contextlib.suppress(ImportError):
      importlib.import_module("readline")  # for line editing and history
    print("Type a line, or /help. Ctrl-D leaves.")
    if opening:
      self._turn(lambda: self._read(self._encode(opening)))
    while True:
      try:
        line = self._ask("> ")
      except EOFError:
        print()
        return
      except KeyboardInterrupt:
        print("\n(Ctrl-D or /quit leaves)")
        continue
      if line.strip() in ("/quit", "/exit"):
        return
      try:
        self.take(line)
      except KeyboardInterrupt:
        print("\n(stopped)")
      except Exception as error:  # keep the conversation alive
        _tell_error(error)

  def take(self, line: str) -> None:
    """Executes one line.

    Raises:
      UserError: a command is unknown or fails; nothing has changed.
    """
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if not line.startswith("/"):
      self._turn(lambda: self._answer(line))
    elif name not in _COMMANDS:
      raise errors.UserError(f"{name} is no command; /help lists them")
    else:
      _COMMANDS[name](self, argument)

  def _turn(self, do: Callable[[], None]) -> None:
    """Runs a change of the session that can be undone."""
    before = self.session
    try:
      do()
    finally:  # also after an interrupt
      if self.session is not before:
        self._before.append(before)

  def _answer(self, line: str) -> None:
    read = self.session
    if line:
      ids = self._encode(line + "\n")
      read = prefill.read(self._owner.model, read, [ids])
    shown = stop.Text(self._owner.tokenizer, self.stops)
    made, seconds, then = 0, 0.0, None
    with terminal.Interrupt() as interrupt:
      for piece in generate.generate(
        self._owner.model,
        read,
        tokens=self._tokens,
        settings=self._settings,
        stops=self.stops,
        vocab_size=self._owner.tokenizer.vocab_size,
      ):
        self.session = piece.session
        for token in piece.ids[0]:
          terminal.show(shown.push(int(token)))
        now = time.monotonic()
        if then is not None:  # compiling may have delayed the first piece
          made, seconds = made + len(piece.ids[0]), seconds + now - then
        then = now
        if interrupt.requested:
          break
    terminal.show(shown.finish() + "\n")
    self._tell(f"{made / seconds:,.0f} tokens/s" if made else "a short answer")

  def _read(self, ids: np.ndarray) -> None:
    self.session = prefill.read(self._owner.model, self.session, [ids])
    self._tell(f"{len(ids):,} of them now")

  def _tell(self, more: str) -> None:
    print(
      f"[{int(self.session.position[0]):,} tokens read, {more}, state"
      f" {session_lib.num_bytes(self.session):,} bytes]"
    )

  def _read_file(self, name: str) -> None:
    path = pathlib.Path(paths.expand(name))
    try:
      text = path.read_bytes()
      text.decode()
    except OSError as error:
      raise errors.UserError(
        f"cannot read {name or 'no file'}: {error.strerror}; write /read FILE"
      ) from error
    except UnicodeDecodeError as error:
      raise errors.UserError(
        f"{name} is not UTF-8 (byte {error.start}); convert the file"
      ) from error
    ids = self._owner.tokenizer.encode_bytes(text)
    if not len(ids):
      raise errors.UserError(f"{name} is empty; there is nothing to read")
    self._turn(lambda: self._read(ids))

  def _state(self, unused: str) -> None:
    layers = contents.measure(self._owner.model, self.session)
    self._tell(f"{len(layers)} layers")
    print(contents.table(layers))

  def _save(self, folder: str) -> None:
    self._need(folder, "/save FOLDER")
    size = saved.save(folder, self.session, self._owner)
    print(f"saved {folder}: {size:,} bytes")

  def _load(self, folder: str) -> None:
    self._need(folder, "/load FOLDER")
    session = saved.load(folder, self._owner)
    if len(session.position) != 1:
      raise errors.UserError(
        f"{folder} holds {len(session.position)} texts; a chat takes one"
      )
    self._before.append(self.session)
    self.session = session
    self._tell(f"from {folder}")

  def _undo(self, unused: str) -> None:
    if not self._before:
      raise errors.UserError("there is no turn to undo")
    self.session = self._before.pop()
    self._tell("as before the last turn")

  def _new(self, unused: str) -> None:
    self._before.append(self.session)
    self.session = session_lib.start(self._owner.model)
    self._tell("all forgotten")

  def _set(self, assignment: str) -> None:
    name, equals, value = assignment.partition("=")
    kinds = {f.name: f.type for f in dataclasses.fields(sample.Settings)}
    if not equals or name not in (*kinds, "tokens", "stop"):
      raise errors.UserError(
        f"/set {assignment}: write NAME=VALUE, NAME one of"
        f" {', '.join((*kinds, 'tokens', 'stop'))}"
      )
    if name == "stop":
      # Escapes as in source code: \n is a line break.
      text = value.replace("\\n", "\n").replace("\\t", "\t")
      self.stops = self._make_stops([text] if text else [])
      return
    kind = float if kinds.get(name) is float else int
    try:
      number: Any = kind(value)
    except ValueError as error:
      a_number = "number" if kind is float else "whole number"
      raise errors.UserError(
        f"/set {assignment}: {value!r} is no {a_number}"
      ) from error
    if name != "tokens":
      values: dict[str, Any] = dataclasses.asdict(self._settings)
      values[name] = number
      self._settings = sample.Settings(**values)
    else:
      limits.check("tokens", number)
      self._tokens = number

  def _help(self, unused: str) -> None:
    print(HELP)

  def _need(self, argument: str, usage: str) -> None:
    if not argument:
      raise errors.UserError(f"write {usage}")

  def _encode(self, text: str) -> np.ndarray:
    return self._owner.tokenizer.encode(text)

  def _make_stops(self, strings: Sequence[str]) -> stop.Stops | None:
    return stop.make(strings, self._owner.tokenizer)


def _tell_error(error: Exception) -> None:
  line = errors.explain(error)
  if line is None:
    traceback.print_exception(error)
    line = "a fault of the program; the conversation goes on as it was before"
  print(f"error: {line}")


_COMMANDS = {
  "/help": Chat._help,
  "/read": Chat._read_file,
  "/state": Chat._state,
  "/save": Chat._save,
  "/load": Chat._load,
  "/undo": Chat._undo,
  "/new": Chat._new,
  "/set": Chat._set,
}
