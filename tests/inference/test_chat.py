import itertools
import os
import signal

import inference_cases as cases
import jax
import numpy as np
import pytest

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import generate, prefill, sample

BYTES = tokenizer_lib.ByteTokenizer()
SETTINGS = sample.Settings(temperature=0.8, seed=3)
LONG = "a" * 300


@pytest.fixture
def talk(talk_by):
  defaults = {"tokens": 20, "settings": SETTINGS}
  return lambda *lines, **more: talk_by(*lines, **defaults | more)


def answer(owner, session, line, tokens=20, settings=SETTINGS, **more):
  session = prefill.read(owner.model, session, [BYTES.encode(line + "\n")])
  pieces = cases.pieces(owner.model, session, tokens, settings, **more)
  (ids,) = cases.joined(pieces)
  return pieces[-1].session, BYTES.decode(ids)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_turns_go_on_from_each_other(owner, talk):
  found, out = talk("one", "two")
  session, first = answer(owner, cases.read(owner.model, [b""]), "one")
  session, second = answer(owner, session, "two")
  assert_equal(found.session, session)
  assert first in out and second in out[out.index(first) :]
  assert "[48 tokens read, " in out


def test_commands(owner, talk, tmp_path):
  folder, text = tmp_path / "talk", tmp_path / "text.txt"
  text.write_text("one tex")
  lines = ["one", f"/save {folder}", "two", "/undo", "/undo", f"/load {folder}"]
  found, out = talk(*lines)
  once, _ = talk("one")
  assert_equal(found.session, once.session)
  assert f"saved {folder}: " in out
  found, _ = talk("one", "two", "/new", f"/read {text}")
  assert_equal(
    found.session, cases.read(owner.model, [BYTES.encode("one tex")])
  )
  found, out = talk("/set tokens=3", "/set temperature=0", "one", "/quit", "x")
  _, expected = answer(
    owner, cases.read(owner.model, [b""]), "one", 3, cases.GREEDY
  )
  assert expected in out
  assert found.session.position.tolist() == [7]
  found, _ = talk("/set stop=a\\n")
  assert found.stops.final[found.stops.table[1, ord("\n")]]
  found, _ = talk("/set stop=", stop_strings=["a"])
  assert found.stops is None


def test_an_opening_is_read_first(owner, talk):
  found, _ = talk(opening="one")
  assert_equal(found.session, cases.read(owner.model, [BYTES.encode("one")]))


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("/sav x", "/sav is no command; /help lists them"),
    ("/save", "write /save FOLDER"),
    ("/load nowhere", "is no saved session"),
    ("/read nowhere", "cannot read nowhere: No such file"),
    ("/read", "/read names no file; write /read FILE"),
    ("/undo", "there is no turn to undo"),
    ("/state", "nothing has been read yet"),
    ("/set top_k", "write NAME=VALUE, NAME one of temperature,"),
    ("/set top=3", "write NAME=VALUE, NAME one of temperature,"),
    ("/set top_k=a", "'a' is no whole number"),
    ("/set top_k=-1", "top_k=-1: give a whole number"),
    ("/set tokens=0", "tokens=0: give 1 or more"),
    ("/set tokens=9999999999", "tokens=9999999999: give 2147483647 or less"),
    (f"/set tokens={'9' * 5000}", "is no whole number"),
    ("/set seed=-1", "seed=-1: give a whole number in [0, 2**32)"),
    ("/set seed=4294967296", "seed=4294967296: give a whole number"),
    ("/set temperature=1e999", "temperature=inf: give a finite number"),
    ("/read ~nobody-of-it/x", "no home folder is known"),
    (f"/read {LONG}", "File name too long"),
    ("/read a\0b", "null byte"),
    ("/read .", "Is a directory"),
    ("/load /proc/x", "is no saved session"),
    (f"/load {LONG}", "File name too long"),
    ("/load a\0b", "null byte"),
    ("a\udcff", "character 1 of the text is the byte 0xff, which is not"),
    ("", "the prompt is empty"),
  ],
)
def test_mistakes_are_one_line_and_change_nothing(talk, line, message):
  found, out = talk(line)
  said = out.splitlines()
  assert len(said) == 3  # a greeting, this, and the end of the input
  assert said[1].startswith("error: ") and message in said[1]
  assert found.session.position.tolist() == [0]


@pytest.mark.parametrize(
  ("folder", "message"),
  [
    ("file/x", "Not a directory"),
    (LONG, "File name too long"),
    ("/proc/x", "cannot write"),
    ("~nobody-of-it/x", "no home folder is known"),
    ("a\0b", "null byte"),
    ("file", "is there already"),
  ],
)
def test_a_folder_that_cannot_be_is_no_end(
  talk, tmp_path, monkeypatch, folder, message
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").touch()
  found, out = talk("one", f"/save {folder}", "two", "/save ok")
  (line,) = (x for x in out.splitlines() if x.startswith("error: "))
  assert message in line
  assert found.session.position.tolist() == [48]
  assert "saved ok: " in out
  assert {path.name for path in tmp_path.iterdir()} == {"file", "ok"}


@pytest.mark.parametrize(
  ("error", "line"),
  [
    (OSError(28, "No space left on device", "x"), "x: No space left on device"),
    (MemoryError(), "not enough memory"),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "not enough memory"),
    (KeyError("a bug"), "a fault of the program; the conversation goes on"),
  ],
)
def test_no_error_ends_a_conversation(talk, monkeypatch, capsys, error, line):
  read, count = prefill.read, itertools.count()

  def broken(*arguments, **keywords):
    if next(count) == 1:
      raise error
    return read(*arguments, **keywords)

  monkeypatch.setattr(prefill, "read", broken)
  found, out = talk("one", "lost", "two")
  assert f"error: {line}" in out
  assert found.session.position.tolist() == [48]


def test_a_stop_string_ends_an_answer(owner, talk):
  settings = sample.Settings(temperature=0.7, seed=1)
  _, whole = answer(owner, cases.read(owner.model, [b""]), "one", 40, settings)
  pairs = [whole[i : i + 2] for i in range(3, len(whole) - 1)]
  end = next(pair for pair in pairs if "\ufffd" not in pair)
  found, out = talk("one", tokens=40, settings=settings, stop_strings=[end])
  assert whole[: whole.index(end)] + "\n[" in out
  assert found.session.position[0] < 44


def test_ctrl_c_ends_an_answer_and_keeps_what_was_shown(
  owner, talk, monkeypatch
):
  made = generate.generate

  def interrupted(*arguments, **keywords):
    for number, piece in enumerate(made(*arguments, **keywords)):
      if number == 1:
        os.kill(os.getpid(), signal.SIGINT)
      yield piece

  before = signal.getsignal(signal.SIGINT)
  monkeypatch.setattr(generate, "generate", interrupted)
  found, out = talk(KeyboardInterrupt, "one", tokens=1000)
  assert signal.getsignal(signal.SIGINT) is before
  assert "(Ctrl-D or /quit leaves)" in out
  monkeypatch.undo()
  session, expected = answer(
    owner, cases.read(owner.model, [b""]), "one", 2 * generate.PIECE
  )
  assert expected in out
  assert_equal(found.session, session)


def test_ctrl_c_while_reading_leaves_the_session(talk, monkeypatch, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("text")
  monkeypatch.setattr(
    prefill, "read", lambda *_: os.kill(os.getpid(), signal.SIGINT)
  )
  found, out = talk(f"/read {text}", "/undo")
  assert "(stopped)" in out and "no turn to undo" in out
  assert found.session.position.tolist() == [0]


def test_sigterm_ends_a_chat(talk):
  """At the prompt, where Ctrl-C only says how to leave."""
  with pytest.raises(errors.Terminated):
    talk(errors.Terminated, "one")
