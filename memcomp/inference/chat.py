"""A conversation in a terminal: the model reads each line and continues.

Without a chat template, the text alternates between typed lines, each with a
line break, and answers; there are no other markers. With one, lines and answers
are the messages of a conversation, written as in training. A session is a
value, so undoing a turn means returning to the previous one.
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
from memcomp.data import chat_template
from memcomp.inference import (
  contents,
  dialogue,
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
Type a line: the model reads it and continues. An empty line only continues;
in a conversation, an answer that was cut off.
Ctrl-C stops an answer; the model remembers what it has shown.
  /read FILE        read a text file, of any length (a conversation reads it
                    as the beginning of the next message)
  /state            what the memories contain
  /save FOLDER      keep the session on disk
  /load FOLDER      continue a saved session
  /undo             forget the last turn
  /new              forget everything
  /set NAME=VALUE   tokens, temperature, top_k, top_p, min_p, seed,
                    repetition_penalty, or stop (a text; none: stop=)
  /quit             leave (Ctrl-D)"""


_Place = tuple[session_lib.Session, dialogue.Dialogue | None, bytes]
"""A session, what was said in it, and the end of an answer that was cut off,
which is not shown before it is certain that no stop string begins there."""


class Chat:
  """One conversation.

  Attributes:
    session: the text that the model has read so far.
    said: the messages of a conversation; None without a chat template.
    stops: what ends an answer, or None.
  """

  def __init__(
    self,
    owner: saved.Owner,
    *,
    tokens: int,
    settings: sample.Settings,
    stop_strings: Sequence[str] = (),
    template: chat_template.Template | None = None,
    ask: Callable[[str], str] | None = None,
  ):
    """Starts with an empty text.

    Args:
      owner: the model.
      tokens: maximum length of an answer.
      settings: sampling settings.
      stop_strings: texts that end an answer; they are read, but not shown.
      template: chat template of the model's training; None for a model that
        was trained on text.
      ask: shows a prompt and returns a line, or raises EOFError at the end;
        default `input`.

    Raises:
      UserError: the model's ids stand for no text, a stop string is empty, or
        `tokens` is below 1.
    """
    owner.tokenizer.encode("")  # raises if ids stand for no text
    self._owner = owner
    limits.check("tokens", tokens)
    self._tokens = tokens
    self._settings = settings
    self._template = template
    # Of the model's own answers, whatever the user's stop strings are.
    self._end = self._make_stops([])
    self.stops = self._make_stops(stop_strings) if stop_strings else self._end
    self._ask = ask or input
    self._rest = b""
    self._before = collections.deque[_Place](maxlen=_UNDO)
    self.said: dialogue.Dialogue | None
    self._restart()

  def run(self, opening: str = "") -> None:
    """Runs the conversation until the end of the input.

    Args:
      opening: text to read first; in a conversation the system's message.
    """
    with contextlib.suppress(ImportError):
      importlib.import_module("readline")  # for line editing and history
    print("Type a line, or /help. Ctrl-D leaves.")
    if opening and self.said is not None:
      system = chat_template.Message("system", opening)
      self.said = self.said._replace(messages=(system,))
    elif opening:
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
    before = self.session, self.said, self._rest
    try:
      do()
    finally:  # also after an interrupt
      if self.session is not before[0] or self.said is not before[1]:
        self._before.append(before)

  def _restart(self) -> None:
    self.session = session_lib.start(self._owner.model)
    self.said, self._rest = None, b""
    if self._template is not None:
      self.said = dialogue.Dialogue(self._template)

  def _answer(self, line: str) -> None:
    read, text, asked = self.session, line + "\n" * bool(line), None
    if self.said is not None:
      asked, text = self.said.ask(line)
    if text:
      read = prefill.read(self._owner.model, read, [self._encode(text)])
    rest = b"" if text else self._rest  # no text goes on with an answer
    shown = stop.Text(self._owner.tokenizer, self.stops, rest)
    written = stop.Text(self._owner.tokenizer, self._end, rest)
    made, seconds, then = 0, 0.0, None
    answer = ""
    with terminal.Interrupt() as interrupt:
      for piece in generate.generate(
        self._owner.model,
        read,
        tokens=self._tokens,
        settings=self._settings,
        stops=self.stops,
        vocab_size=self._owner.tokenizer.vocab_size,
        node=shown.node,
      ):
        ids = piece.ids[0].tolist()
        new = [shown.push(token) for token in ids]
        for token in ids:
          written.push(token)
        # By the model, instead of a limit or a user.
        ended = written.stopped or (self.stops and ids[-1] in self.stops.ids)
        answer += "".join(new)
        self.session = piece.session
        self.said = asked and asked.answered(
          answer + _decoded(shown.rest()),
          ended=bool(ended),
          again=_decoded(rest),
        )
        self._rest = b"" if shown.stopped else shown.rest()
        for part in new:
          terminal.show(part)
        now = time.monotonic()
        if then is not None:  # compiling may have delayed the first piece
          made, seconds = made + len(piece.ids[0]), seconds + now - then
        then = now
        if interrupt.requested:
          break
    terminal.show((shown.finish() if shown.stopped else "") + "\n")
    self._tell(f"{made / seconds:,.0f} tokens/s" if made else "a short answer")

  def _read(self, ids: np.ndarray) -> None:
    self.session = prefill.read(self._owner.model, self.session, [ids])
    self._rest = b""
    self._tell(f"{len(ids):,} of them now")

  def _tell(self, more: str) -> None:
    print(
      f"[{int(self.session.position[0]):,} tokens read, {more}, state"
      f" {session_lib.num_bytes(self.session):,} bytes]"
    )

  def _read_file(self, name: str) -> None:
    if not name:
      raise errors.UserError("/read names no file; write /read FILE")
    path = pathlib.Path(paths.expand(name))
    with paths.reading_text(name, fix="write /read FILE"):
      text = path.read_bytes()
      text.decode()
    ids = self._owner.tokenizer.encode_bytes(text)
    if not len(ids):
      raise errors.UserError(f"{name} is empty; there is nothing to read")
    if self.said is None:
      self._turn(lambda: self._read(ids))
    else:
      self._turn(lambda: self._hold(text.decode()))

  def _hold(self, text: str) -> None:
    assert self.said is not None
    held = "\n".join(part for part in (self.said.held, text) if part)
    self.said = self.said._replace(held=held)
    self._tell(f"{len(held):,} characters begin the next message")

  def _state(self, unused: str) -> None:
    layers = contents.measure(self._owner.model, self.session)
    self._tell(f"{len(layers)} layers")
    print(contents.table(layers))

  def _save(self, folder: str) -> None:
    self._need(folder, "/save FOLDER")
    said = None if self.said is None else self.said.to_dict()
    size = saved.save(folder, self.session, self._owner, said, self._rest)
    print(f"saved {folder}: {size:,} bytes")

  def _load(self, folder: str) -> None:
    self._need(folder, "/load FOLDER")
    session = saved.load(folder, self._owner)
    if len(session.position) != 1:
      raise errors.UserError(
        f"{folder} holds {len(session.position)} texts; a chat takes one"
      )
    found, rest = saved.load_chat(folder)
    place = session, self._said_in(folder, found), rest
    self._turn(lambda: self._go_on(place))
    self._tell(f"from {folder}")

  def _go_on(self, place: _Place) -> None:
    self.session, self.said, self._rest = place

  def _said_in(
    self, folder: str, found: dict[str, Any] | None
  ) -> dialogue.Dialogue | None:
    """Returns the messages of a saved session, whose `dialogue` was found."""
    if self._template is None:
      return None
    if found is None:
      raise errors.UserError(
        f"{folder} holds a text without messages; a conversation cannot go on"
        " from it"
      )
    with errors.malformed(f"the dialogue in {folder}", "restore it"):
      return dialogue.of_dict(self._template, found)

  def _undo(self, unused: str) -> None:
    if not self._before:
      raise errors.UserError("there is no turn to undo")
    self.session, self.said, self._rest = self._before.pop()
    self._tell("as before the last turn")

  def _new(self, unused: str) -> None:
    self._turn(self._restart)
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
    own = [self._template.stop] if self._template else []
    return stop.make([*own, *strings], self._owner.tokenizer)


def _decoded(rest: bytes) -> str:
  return rest.decode(errors="replace")


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
