import hashlib
import importlib.resources
import random
import re

import pytest

from memcomp.data.synthetic import niah, stand_in

KEYS = niah.Keys(stand_in.ADJECTIVES, stand_in.NOUNS)
HAYSTACKS = {
  "noise": niah.Noise(),
  "essay": niah.Essay(stand_in.ESSAY),
}


def num_bytes(text: str) -> int:
  return len(text.encode())


def draw(keys, haystack, **kwargs):
  settings = {"kind": "number", "num_samples": 20, "count_tokens": num_bytes}
  return list(niah.samples(keys=keys, haystack=haystack, **settings | kwargs))


def digest(samples) -> str:
  text = "\0".join(sample.prompt + sample.answer for sample in samples)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def benchmark_keys():
  folder = importlib.resources.files("wonderwords.assets")
  lists = [
    [line.rstrip() for line in (folder / name).read_text("utf-8").splitlines()]
    for name in ("adjectivelist.txt", "nounlist.txt")
  ]
  return niah.Keys(*lists)


def test_words_of_the_benchmark(benchmark_keys):
  assert len(benchmark_keys) == 6_171_620
  assert benchmark_keys[0] == "Early-ATM"
  assert benchmark_keys[-1] == "zonked-zucchini"
  assert benchmark_keys.fingerprint == "e5e6a09ed20903cb"


@pytest.mark.parametrize(
  ("length", "golden"),
  [
    (2048, "9a0b3301756d5d80"),
    (8192, "49b1ee35cc1fabaf"),
    (32768, "27b4ab061b97e9ff"),
  ],
)
def test_draw_for_draw_as_the_benchmark(benchmark_keys, length, golden):
  samples = draw(benchmark_keys, niah.Noise(), max_tokens=length)
  assert digest(samples) == golden


def test_keys_are_looked_up_as_sorted():
  adjectives = ["long", "long-term", "old", "longer", "old", "a b", "a"]
  nouns = ["x", "term-x", "Y", "x", "z"]
  words = sorted({f"{a}-{n}" for a in adjectives for n in nouns})
  keys = niah.Keys(adjectives, nouns)
  assert list(keys) == words
  joined = "\n".join(words).encode()
  assert keys.fingerprint == hashlib.sha256(joined).hexdigest()[:16]
  with pytest.raises(ValueError, match="at least one"):
    niah.Keys(adjectives, [])


# What is bundled: a change of it, or of a draw, is a change of the task.
@pytest.mark.parametrize(
  ("haystack", "kind", "length", "golden"),
  [
    ("noise", "number", 2048, "7a1752313b5be4b1"),
    ("noise", "number", 8192, "ba139147a14df301"),
    ("essay", "number", 8192, "a173e26557c6be9f"),
    ("essay", "uuid", 8192, "621aa54223b104ba"),
  ],
)
def test_golden_of_the_stand_ins(haystack, kind, length, golden):
  samples = draw(KEYS, HAYSTACKS[haystack], kind=kind, max_tokens=length)
  assert digest(samples) == golden


def pieces(prompt, key_of=r"for (\S+) mentioned"):
  """The lines of a prompt's context, the sentence hidden there, and the key."""
  head, *context, question = prompt.split("\n")
  (needle,) = re.findall(r"One of the special magic .*?: \S+\.", prompt)
  key, again = re.findall(key_of, question)
  assert key == again
  return head, context, needle, key


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("kind", ["number", "uuid"])
def test_a_question_is_answered_by_its_needle(haystack, kind):
  depths = set()
  for sample in draw(KEYS, HAYSTACKS[haystack], kind=kind, max_tokens=6000):
    head, context, needle, key = pieces(sample.prompt)
    assert head.startswith(f"A special magic {kind} is hidden within")
    adjective, noun = key.split("-")
    assert adjective in stand_in.ADJECTIVES and noun in stand_in.NOUNS
    assert needle == (
      f"One of the special magic {kind}s for {key} is: {sample.answer}."
    )
    assert re.fullmatch(
      r"[1-9]\d{6}" if kind == "number" else r"[0-9a-f]{8}(-[0-9a-f]{4,12}){4}",
      sample.answer,
    )
    assert sample.prompt.endswith(
      f" The special magic {kind} for {key} mentioned in the provided text is"
    )
    assert sample.tokens == num_bytes(sample.prompt) + 128 <= 6000
    text = "\n".join(context)
    share = text.index(needle) / (len(text) - len(needle))
    assert abs(share - sample.depth) < 0.1  # of sentences
    depths.add(sample.depth)
  assert len(depths) > 10


def test_haystacks_hold_what_they_say():
  rng = random.Random(0)
  text, depth = niah.Noise().hide("needle", 7, rng)
  lines = text.split("\n")
  assert lines.index("needle") == round(7 * depth)
  lines.remove("needle")
  assert (
    lines
    == [
      "The grass is green. The sky is blue. The sun is yellow. Here we go."
      " There and back again."
    ]
    * 7
  )

  essay = niah.Essay("One two.\n Three\tfour? Five")
  for units, left in (
    (4, "One two. Three four?"),
    (7, "One two. Three four? Five One two."),  # over again
  ):
    text, _ = essay.hide("NEEDLE.", units, rng)
    assert re.sub(r"NEEDLE\.\s?", "", text).strip() == left
    assert text.count("NEEDLE.") == 1


@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_haystack_is_as_large_as_fits(haystack):
  length = 9000
  (step,) = {HAYSTACKS[haystack].step(length)}
  counts = [
    s.tokens for s in draw(KEYS, HAYSTACKS[haystack], max_tokens=length)
  ]
  unit = {"noise": 88, "essay": 6}[haystack]
  # One too long has lost a step.
  assert length - (step + 2) * unit < max(counts) <= length
  assert max(counts) > length - 2 * unit - 40


@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_a_needle_that_does_not_fit_raises(haystack):
  with pytest.raises(
    niah.DoesNotFitError, match=r"takes [\d,]+ tokens .* more than 700"
  ):
    draw(KEYS, HAYSTACKS[haystack], max_tokens=700)


def test_a_length_that_fits_some_keys_is_that_of_all_samples():
  """Keys have 7 to 17 bytes, three times in a text."""
  samples = niah.samples(
    kind="number",
    keys=KEYS,
    haystack=HAYSTACKS["noise"],
    max_tokens=914,
    count_tokens=lambda text: len(text.encode()),
    num_samples=20,
    seed=42,
  )
  assert [sample.tokens <= 914 for sample in samples] == 20 * [True]


def test_draws_are_of_the_seed_alone():
  random.seed(3)
  state = random.getstate()
  first = draw(KEYS, niah.Noise(), max_tokens=2048, seed=5)
  assert random.getstate() == state
  random.seed(4)
  assert draw(KEYS, niah.Noise(), max_tokens=2048, seed=5) == first
  assert draw(KEYS, niah.Noise(), max_tokens=2048, seed=6) != first


def test_tokens_and_sentences_are_counted_as_told():
  halves = draw(
    KEYS,
    niah.Noise(),
    max_tokens=2048,
    count_tokens=lambda text: num_bytes(text) // 2,
  )
  assert all(1700 < s.tokens <= 2048 for s in halves)
  assert all(s.tokens == num_bytes(s.prompt) // 2 + 128 for s in halves)

  whole = niah.Essay(stand_in.ESSAY, sentences=lambda text: [text])
  for sample in draw(KEYS, whole, max_tokens=6000):
    _, context, needle, _ = pieces(sample.prompt)
    assert context[0].startswith((" " + needle, "Keeping"))
    assert context[0].startswith(" " + needle) != context[0].endswith(
      needle + " "
    )
