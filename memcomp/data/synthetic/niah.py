"""A needle in a haystack: RULER's niah_single_1, 2 and 3 (arXiv 2404.06654).

A sentence with a key and its value is hidden in a long text. The prompt asks
for the key's value, in words that the model only has to continue:

  A special magic number is hidden within the following text. ...
  The grass is green. ...
  One of the special magic numbers for brave-otter is: 1234567.
  The grass is green. ...
  What is the special magic number for brave-otter mentioned in the provided
  text? The special magic number for brave-otter mentioned in the provided
  text is

Every draw equals that of the benchmark's script for the same word lists, essay,
sentence splitter and token counts. The script sizes the haystack by binary
search with a fresh sample per probe, so token counts affect the draws.
"""

import bisect
import functools
import hashlib
import itertools
import math
import random
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

NEEDLES = {
  "single_1": ("noise", "number"),
  "single_2": ("essay", "number"),
  "single_3": ("essay", "uuid"),
}
"""Name -> haystack and kind of value."""

ANSWER_TOKENS = 128
"""Tokens of the answer, which count towards a text's length."""

TRIES = 100
"""Draws of the smallest haystack before giving up, while none has fit; keys
and values differ in length."""

_NOISE = (
  "The grass is green. The sky is blue. The sun is yellow. Here we go. There"
  " and back again."
)

_PROMPT = (
  "A special magic {kind} is hidden within the following text. Make sure to"
  " memorize it. I will quiz you about the {kind} afterwards.\n{context}\nWhat"
  " is the special magic {kind} for {key} mentioned in the provided text? The"
  " special magic {kind} for {key} mentioned in the provided text is"
)

_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Percent of an essay's sentences before the needle."""


class DoesNotFitError(ValueError):
  """The smallest haystack is too long."""


class Sample(NamedTuple):
  """One question.

  Attributes:
    prompt: the model's whole input; the answer begins with a space.
    answer: the value.
    depth: share of the haystack before the needle, in [0, 1].
    tokens: tokens of prompt and answer, at most `max_tokens`.
  """

  prompt: str
  answer: str
  depth: float
  tokens: int


class Keys(Sequence[str]):
  """All different "adjective-noun" words, sorted.

  The benchmark's lists give six million words, which are not stored. Words that
  begin with the same adjective are adjacent, so the k-th can be computed.
  """

  def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]):
    """Takes lists in any order, with repetitions.

    Raises:
      ValueError: a list is empty.
    """
    self._nouns = sorted(set(nouns))
    # "long-term-" begins with "long-", so its words are among those.
    self._groups: list[list[str]] = []
    for stem in sorted({f"{adjective}-" for adjective in adjectives}):
      if self._groups and stem.startswith(self._groups[-1][0]):
        self._groups[-1].append(stem)
      else:
        self._groups.append([stem])
    sizes = (
      len(self._nouns) if len(stems) == 1 else len(self._of(group))
      for group, stems in enumerate(self._groups)
    )
    self._ends = list(itertools.accumulate(sizes))
    if not self._ends or not self._nouns:
      raise ValueError("keys need at least one adjective and one noun")

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index):
    index = range(len(self))[index]
    group = bisect.bisect_right(self._ends, index)
    index -= self._ends[group - 1] if group else 0
    stems = self._groups[group]
    if len(stems) == 1:
      return stems[0] + self._nouns[index]
    return self._of(group)[index]

  @functools.cached_property
  def fingerprint(self) -> str:
    """16 hex digits of the SHA-256 of all words, one per line."""
    digest = hashlib.sha256()
    for group in range(len(self._groups)):
      digest.update(("\n" if group else "").encode())
      digest.update("\n".join(self._of(group)).encode())
    return digest.hexdigest()[:16]

  def _of(self, group: int) -> list[str]:
    stems = self._groups[group]
    if len(stems) == 1:
      return [stems[0] + noun for noun in self._nouns]
    return sorted({stem + noun for stem in stems for noun in self._nouns})


class Haystack(Protocol):
  """A text in which needles are hidden."""

  def step(self, max_tokens: int) -> int:
    """Returns the minimum size, and the reduction if it is too long."""
    ...

  def hide(
    self, needle: str, units: int, rng: random.Random
  ) -> tuple[str, float]:
    """Returns a text of `units` with the needle, and the needle's depth."""
    ...


class Noise:
  """A few repeated sentences; a unit is one repetition."""

  def step(self, max_tokens: int) -> int:
    """See `Haystack.step`."""
    return 5 if max_tokens < 4096 else 25

  def hide(
    self, needle: str, units: int, rng: random.Random
  ) -> tuple[str, float]:
    """See `Haystack.hide`."""
    (index,) = rng.sample(range(units), 1)
    lines = [_NOISE] * units
    lines.insert(index, needle)
    return "\n".join(lines), index / units


def split_sentences(text: str) -> list[str]:
  """Cuts after ., ! and ? before a space; the benchmark uses nltk's punkt."""
  return re.split(r"(?<=[.!?])\s+", text)


class Essay:
  """A text, repeated if it is too short; a unit is a word."""

  def __init__(
    self,
    text: str,
    sentences: Callable[[str], list[str]] = split_sentences,
  ):
    """Takes a text and a sentence splitter."""
    self._words = re.sub(r"\s+", " ", text).split(" ")
    self._split = sentences
    # Most samples of a length have the same number of words.
    self._sentences = functools.lru_cache(4)(self._first)

  def _first(self, units: int) -> list[str]:
    repeats = -(-units // len(self._words))
    words = (self._words * repeats)[:units]
    return self._split(" ".join(words).strip())

  def step(self, max_tokens: int) -> int:
    """See `Haystack.step`."""
    return 500

  def hide(
    self, needle: str, units: int, rng: random.Random
  ) -> tuple[str, float]:
    """See `Haystack.hide`."""
    sentences = self._sentences(units)
    (depth,) = rng.sample(_DEPTHS, 1)
    index = int(len(sentences) * (depth / 100))
    parts = " ".join(sentences[:index]), needle, " ".join(sentences[index:])
    return " ".join(parts), depth / 100


def number(rng: random.Random) -> str:
  """Draws a value of seven digits."""
  return str(rng.randint(10**6, 10**7 - 1))


def uuid4(rng: random.Random) -> str:
  """Draws a value of 36 characters."""
  return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_VALUES = {"number": number, "uuid": uuid4}


def draw(
  rng: random.Random,
  *,
  kind: str,
  keys: Sequence[str],
  haystack: Haystack,
  units: int,
) -> tuple[str, str, float]:
  """Draws one question.

  Args:
    rng: random generator of key, value and position. RULER's script also draws
      which needle to ask for; with one needle the draw is made only to keep the
      random numbers equal.
    kind: kind of value, "number" or "uuid".
    keys: keys to choose from.
    haystack: the haystack.
    units: size of the haystack.

  Returns:
    Prompt, value, and depth of the needle.
  """
  key = rng.choice(keys)
  value = _VALUES[kind](rng)
  needle = f"One of the special magic {kind}s for {key} is: {value}."
  context, depth = haystack.hide(needle, units, rng)
  rng.sample(range(1), 1)
  return _PROMPT.format(kind=kind, context=context, key=key), value, depth


def samples(
  *,
  kind: str,
  keys: Sequence[str],
  haystack: Haystack,
  max_tokens: int,
  count_tokens: Callable[[str], int],
  num_samples: int = 500,
  seed: int = 42,
  tries: float = TRIES,
) -> Iterator[Sample]:
  """Draws questions of one length.

  Args:
    kind: kind of value, "number" or "uuid".
    keys: keys to choose from.
    haystack: the haystack, made as large as fits.
    max_tokens: maximum tokens of a prompt and `ANSWER_TOKENS`.
    count_tokens: counts the tokens of a prompt.
    num_samples: number of samples.
    seed: seed of their own generator.
    tries: draws of the smallest haystack before giving up, while none has fit.

  Yields:
    The samples.

  Raises:
    DoesNotFitError: the smallest haystack is too long.
  """
  rng = random.Random(seed)
  step = haystack.step(max_tokens)

  def one(units):
    prompt, value, depth = draw(
      rng, kind=kind, keys=keys, haystack=haystack, units=units
    )
    tokens = count_tokens(prompt) + ANSWER_TOKENS
    return Sample(prompt, value, depth, tokens)

  per_unit = (one(step).tokens - ANSWER_TOKENS) / step
  # A tokenizer that knows none of the words gives no tokens for them.
  most = max_tokens / max(per_unit, 1 / 64) * 3
  low, high = step, max(int(most), 2 * step)
  size = step
  while low <= high:
    middle = (low + high) // 2
    if one(middle).tokens <= max_tokens:
      size, low = middle, middle + 1
    else:
      high = middle - 1
  for _ in range(num_samples):
    units = size
    while (sample := one(units)).tokens > max_tokens:
      if units > step:
        units -= step
        continue
      tries -= 1
      if not tries:
        raise DoesNotFitError(
          f"the smallest haystack takes {sample.tokens:,} tokens with the"
          f" question and the answer, more than {max_tokens:,}"
        )
    tries = math.inf
    yield sample
