import pytest

from memcomp.models import pattern


@pytest.mark.parametrize(
  ("text", "layers", "letters"),
  [
    ("a", 3, "aaa"),
    ("aab", 6, "aabaab"),
    ("8*b,4*a", 12, "bbbbbbbbaaaa"),
    ("b,2*ca", 6, "bbcaca"),
    ("1*b,a", 4, "baaa"),
    ("2*a,b,1*c", 5, "aabbc"),
  ],
)
def test_letters_of_all_layers(text, layers, letters):
  assert pattern.letters(text, layers) == letters


def test_repetitions_are_not_unrolled():
  assert pattern.parse("aab", 600) == (pattern.Part("aab", 200),)


@pytest.mark.parametrize(
  ("text", "layers", "message"),
  [
    ("", 2, "no part"),
    ("d", 2, "no part"),
    ("0*a", 2, "no part"),
    ("aab", 4, "makes 3 layers, num_layers is 4"),
    ("5*a", 4, "makes 5 layers"),
    ("4*a,b", 4, "makes 5 layers"),
    ("a,b", 4, None),
  ],
)
def test_mistakes_are_named(text, layers, message):
  if message is None:
    # The first part without a count fills up; any other comes once.
    assert pattern.letters(text, layers) == "aaab"
    return
  with pytest.raises(ValueError, match=message):
    pattern.parse(text, layers)
