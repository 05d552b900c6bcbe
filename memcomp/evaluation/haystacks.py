"""Haystacks and words for needle questions, bundled or from the user."""

import dataclasses
import functools
import importlib.resources
import json
import pathlib
from collections.abc import Callable
from typing import Any

from memcomp import errors, paths
from memcomp.data.synthetic import niah, stand_in

_WORDS_OF_RULER = "e5e6a09ed20903cb"
"""Fingerprint of wonderwords 3.0.1."""


@dataclasses.dataclass(frozen=True)
class Material:
  """Material for questions.

  Attributes:
    keys: words to ask for.
    essay: text of the essay.
    sentences: sentence splitter, "regex" or "punkt".
    own_essay: whether the user provided the essay.
    own_words: whether the user provided the words.
  """

  keys: niah.Keys
  essay: str
  sentences: str
  own_essay: bool = False
  own_words: bool = False

  def haystack(self, name: str) -> niah.Haystack:
    """Returns the haystack "noise" or "essay"."""
    if name == "noise":
      return niah.Noise()
    return niah.Essay(self.essay, SPLITTERS[self.sentences]())

  def deviations(self, name: str) -> list[str]:
    """Returns the differences from RULER for a haystack of this name."""
    found = []
    if self.keys.fingerprint != _WORDS_OF_RULER:
      found.append("words")
    if name == "essay" and not self.own_essay:
      found.append("essay")
    if name == "essay" and self.sentences != "punkt":
      found.append("sentences")
    return found


def read_words(source: str) -> niah.Keys:
  """Reads adjectives and nouns; `source` is the `word_list` of `niah.run`.

  Raises:
    UserError: a list cannot be read or is empty, or the package is missing.
  """
  if not source:
    return niah.Keys(stand_in.ADJECTIVES, stand_in.NOUNS)
  folder: Any = pathlib.Path(source)
  if source == "wonderwords":
    try:
      folder = importlib.resources.files("wonderwords.assets")
    except ModuleNotFoundError as error:
      raise errors.UserError(
        "--word_list=wonderwords needs the package: pip install"
        " wonderwords==3.0.1"
      ) from error
  lists = []
  for name in ("adjectivelist.txt", "nounlist.txt"):
    text = _read(folder / name, f"--word_list={source}")
    words = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not words:
      raise errors.UserError(f"--word_list={source}: {name} is empty")
    lists.append(words)
  return niah.Keys(*lists)


def read_essay(source: str) -> str:
  """Reads an essay; `source` is the `essay_file` of `niah.run`.

  Raises:
    UserError: it cannot be read, is empty, or is JSON without a "text".
  """
  if not source:
    return stand_in.ESSAY
  text = _read(pathlib.Path(source), f"--essay_file={source}")
  if source.endswith(".json"):
    try:
      text = json.loads(text)["text"]
      if not isinstance(text, str):
        raise TypeError(type(text))
    except (*errors.BAD_JSON, KeyError, TypeError) as error:
      raise errors.UserError(
        f"--essay_file={source}: no JSON object with a text; give one, or a"
        " text file"
      ) from error
  if not text.strip():
    raise errors.UserError(f"--essay_file={source} is empty; give some text")
  return text


def _read(path: Any, flag: str) -> str:
  with paths.reading_text(path.name, place=f"{flag}: "):
    return path.read_text(encoding="utf-8")


def _punkt() -> Callable[[str], list[str]]:
  try:
    from nltk import tokenize

    tokenize.sent_tokenize("A. B.")
  except (ImportError, LookupError) as error:
    raise errors.UserError(
      "--sentences=punkt needs nltk (pip install nltk) and its punkt_tab in a"
      " folder that NLTK_DATA names; leave it out to split by a pattern"
    ) from error
  return tokenize.sent_tokenize


SPLITTERS: dict[str, Callable[[], Callable[[str], list[str]]]] = {
  "regex": lambda: niah.split_sentences,
  "punkt": functools.cache(_punkt),
}
