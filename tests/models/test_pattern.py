"""Patterns: what is written, and the layers that it makes."""

import pytest

from memcomp.models import pattern

NAMES = ("memory", "window", "local")


def names_of(text, layers, names=NAMES):
  parts = pattern.parse(text, layers, names)
  return [name for p in parts for name in p.names * p.repeats]


@pytest.mark.parametrize(
  ("text", "layers", "first_letters"),
  [
    ("memory", 3, "mmm"),
    ("memory+window", 4, "mwmw"),
    ("memory+memory+window", 6, "mmwmmw"),
    ("memory*2+window", 6, "mmwmmw"),
    ("2*memory+window", 3, "mmw"),
    ("8*window,4*memory", 12, "wwwwwwwwmmmm"),
    ("window*8,memory*4", 12, "wwwwwwwwmmmm"),
    ("memory*3,window", 4, "mmmw"),
    ("memory*3,window", 6, "mmmwww"),
    ("window,memory", 4, "wwwm"),
    ("window*1,memory,local", 5, "wmmml"),
    ("2*(memory+window),local", 6, "mwmwll"),
    ("(memory*2+window)*2", 6, "mmwmmw"),
    (" memory * 2 , ( window + local ) * 1 ", 4, "mmwl"),
  ],
)
def test_names_of_all_layers(text, layers, first_letters):
  assert "".join(name[0] for name in names_of(text, layers)) == first_letters


@pytest.mark.parametrize(
  ("text", "layers", "letters"),
  [
    ("a", 3, "aaa"),
    ("aab", 6, "aabaab"),
    ("8*b,4*a", 12, "bbbbbbbbaaaa"),
    ("b,2*ca", 6, "bbcaca"),
    ("1*b,a", 4, "baaa"),
    ("2*a,b,1*c", 5, "aabbc"),
    ("ab*2+c", 5, "ababc"),
  ],
)
def test_words_of_names_of_one_letter(text, layers, letters):
  assert names_of(text, layers, "abc") == list(letters)
  # Where no mixer is called so: the first, the second and the third.
  expected = [NAMES["abc".index(letter)] for letter in letters]
  assert names_of(text, layers) == expected


def test_a_name_is_no_word():
  assert names_of("ab", 2, ("a", "b", "ab")) == ["ab", "ab"]
  assert names_of("ba", 2, ("a", "b", "ab")) == ["b", "a"]


def test_repetitions_are_not_unrolled():
  found = pattern.parse("memory*2+window", 600, NAMES)
  assert found == (pattern.Cycle(("memory", "memory", "window"), 200),)
  found = pattern.parse("400*(memory+window),local", 1000, NAMES)
  assert [part.repeats for part in found] == [400, 200]


@pytest.mark.parametrize(
  ("text", "layers", "message"),
  [
    ("", 2, "'' is no part"),
    ("memory,,window", 2, "'' is no part"),
    ("memory*", 2, r"'memory\*' is no part"),
    ("memory window", 2, "'memory window' is no part"),
    ("memory*(window)", 2, "is no part"),
    ("(memory", 2, "is no part"),
    ("2*((memory))", 2, "is no part"),
    ("()", 2, "'' is no part"),
    ("winow", 2, "no mixer 'winow'"),
    ("memory+winow", 2, "no mixer 'winow'"),
    ("aabx", 4, "no mixer 'aabx'"),
    ("0*memory", 2, "'memory' takes one count, of 1 or more"),
    ("00*memory", 2, "takes one count"),
    ("2*memory*2", 4, "takes one count"),
    ("memory*2+window", 4, "makes 3 layers, num_layers is 4"),
    ("5*memory", 4, "makes 5 layers"),
    ("4*memory,window", 4, "makes 5 layers"),
  ],
)
def test_mistakes_are_named(text, layers, message):
  with pytest.raises(ValueError, match=message) as error:
    pattern.parse(text, layers, NAMES)
  found = str(error.value)
  assert found.startswith(f"pattern={text!r}") and "\n" not in found
  assert "num_layers" in found or "there are memory, window, local" in found
