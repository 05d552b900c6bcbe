import numpy as np
import pytest
import tokenizers

from memcomp import errors
from memcomp.data import chat_template, formats
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import stop

BYTES = tokenizer_lib.ByteTokenizer()


def plain_cut(text: bytes, strings):
  """The text up to the first stop string to be complete, the longest of them."""
  for end in range(1, len(text) + 1):
    found = [s for s in map(str.encode, strings) if text[:end].endswith(s)]
    if found:
      return text[: end - max(map(len, found))], end
  return text, None


def feed(tokenizer, strings, tokens):
  """What is shown after each token, and after which the device stops."""
  stops = stop.Stops(strings, tokenizer)
  text, shown = stop.Text(tokenizer, stops), [""]
  node, stopped = 0, None
  for count, token in enumerate(tokens, 1):
    node = stops.table[node, token]
    if stopped is None and stops.final[node]:
      stopped = count
    shown.append(shown[-1] + text.push(int(token)))
    assert text.stopped == bool(stops.final[node])
  return shown, shown[-1] + text.finish(), stopped


@pytest.mark.parametrize(
  "strings",
  [["a"], ["ab", "ba"], ["abcab"], ["cabc", "bca"], ["aab", "ab"], ["ñ", "bb"]],
  ids=str,
)
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_random_texts_are_cut_as_plainly(kind, strings, words):
  tokenizer = BYTES if kind == "bytes" else words
  rng = np.random.default_rng(0)
  known = (
    [*b"abc", *"ñ".encode()] if kind == "bytes" else [0, 1, 2, *range(10, 16)]
  )
  for _ in range(60):
    tokens = rng.choice(known, 25)
    spelled = [tokenizer.token_bytes(int(t)) for t in tokens]
    expected, end = plain_cut(b"".join(spelled), strings)
    expected = expected.decode(errors="replace")
    shown, whole, stopped = feed(tokenizer, strings, tokens)
    assert whole == expected
    # Never more than that, not even for a while.
    assert all(expected.startswith(part) for part in shown)
    lengths = np.cumsum([len(piece) for piece in spelled])
    assert stopped == (end and int(np.argmax(lengths >= end)) + 1)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_text_that_goes_on_is_as_if_it_had_not_been_cut(kind, words):
  tokenizer = BYTES if kind == "bytes" else words
  rng = np.random.default_rng(1)
  known = (
    [*b"abc", *"ñ".encode()] if kind == "bytes" else [0, 1, 2, *range(10, 16)]
  )
  stops = stop.Stops(["abca", "bcñ"], tokenizer)
  for _ in range(30):
    tokens = rng.choice(known, 25)
    whole = text = stop.Text(tokenizer, stops)
    parts = [[], []]
    text = stop.Text(tokenizer, stops)
    for token in map(int, tokens):
      for one, part in zip((whole, text), parts, strict=True):
        part.append(one.push(token))
      assert (text.node, text.rest()) == (whole.node, whole.rest())
      if not text.stopped:
        text = stop.Text(tokenizer, stops, text.rest())
    assert parts[0] == parts[1]
  # Other stop strings do not end what has come already.
  text = stop.Text(BYTES, stop.Stops(["b"], BYTES), b"ab")
  assert (text.stopped, text.node) == (False, 0)
  assert text.push(ord("c")) == "abc"
  assert stop.Text(BYTES, None, b"ab").push(ord("c")) == "abc"


def test_only_what_may_become_a_stop_string_is_held_back():
  shown, whole, stopped = feed(BYTES, ["\n\nUser"], b"one\n\ntwo\nUs")
  assert shown[3:9] == [
    "one",
    "one",
    "one",
    "one\n\nt",
    "one\n\ntw",
    "one\n\ntwo",
  ]
  assert stopped is None
  assert whole == "one\n\ntwo\nUs"


def test_a_special_token_stops(words):
  (end,) = words.encode("<end>").tolist()
  shown, whole, stopped = feed(words, ["<end>", "cc"], [0, 1, 2, end, 3])
  assert (whole, stopped) == ("abc", 4)
  assert shown[-1] == "abc"


@pytest.mark.parametrize(
  ("strings", "written", "expected", "count"),
  [
    (["<sep>c"], "ab<sep>cd", "ab", 4),
    (["b<sep>"], "ab<sep>", "a", 3),
    (["<end><sep>"], "a<end>b<end><sep>", "ab", 5),
    (["b<sep>c"], "b<sep>b<sep>cd", "b", 5),
    (["<sep>ab"], "a<sep>ab", "a", 3),  # the token <sep>a, and b
    (["b<sep>c"], "abc", "abc", None),
    (["ab", "<sep>c"], "a<sep>b", "ab", None),
    (["abc"], "a<sep>bcd", "", 4),  # it shows nothing
    (["abc", "<sep>d"], "a<sep>bc", "abc", None),  # unless a stop string has it
    (["<end>", "b<end>c"], "ab<end>", "ab", 3),
  ],
)
def test_stop_strings_with_special_tokens(
  strings, written, expected, count, words
):
  tokens = words.encode(written)
  shown, whole, stopped = feed(words, strings, tokens)
  assert (whole, stopped) == (expected, count)
  assert all(expected.startswith(part) for part in shown)
  # A text that has ended holds nothing back.
  assert count is None or shown[count] == expected


@pytest.mark.parametrize("end", ["<end>", "<end><sep>", "<end>ab", "ab<end>"])
def test_the_end_of_a_chat_template_is_found(end, words):
  template = chat_template.of_spec(
    {
      "name": "jinja",
      "source": "{% for m in messages %}{{ m.content }}{{ eos_token }}"
      "{% endfor %}",
      "tokens": {"eos_token": end},
    }
  )
  messages = formats.Messages(words, template)
  said = [("user", "c"), ("assistant", "bc")]
  document = messages.encode("x", [chat_template.Message(*m) for m in said])
  ((first, last),) = document.spans
  answer = document.ids[first:last]
  _, whole, stopped = feed(words, [template.stop], answer)
  assert (whole, stopped) == ("bc", len(answer))


def test_special_tokens_that_take_spaces(tmp_path):
  file = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "\n": 1}, []))
  end = tokenizers.AddedToken("<end>", special=True, rstrip=True)
  file.add_special_tokens([end])
  file.save(str(tmp_path / "tokenizer.json"))
  tokenizer = tokenizer_lib.load(str(tmp_path / "tokenizer.json"))
  assert tokenizer.encode("a<end>\n").tolist() == [0, 2]
  assert stop.Stops(["<end>\n"], tokenizer).ids == {2}


def test_what_the_tokenizer_does_not_know_stops_nothing(tmp_path):
  """It encodes to the special token for unknown text, which has no bytes."""
  model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]")
  unknown = tokenizers.Tokenizer(model)
  unknown.add_special_tokens(["[UNK]"])
  unknown.save(str(tmp_path / "tokenizer.json"))
  tokenizer = tokenizer_lib.load(str(tmp_path / "tokenizer.json"))
  assert tokenizer.encode("日本").tolist() == [0]
  assert not stop.Stops(["日本"], tokenizer).ids
  assert stop.Stops(["[UNK]"], tokenizer).ids == {0}


def test_without_stop_strings_all_is_shown():
  text = stop.Text(BYTES)
  made = "añ→z".encode() + b"\xff" + "ñ".encode()[:1]
  pieces = [text.push(token) for token in made]
  assert "".join(pieces) == "añ→z\ufffd"
  assert text.finish() == "\ufffd"


def test_empty_stop_strings():
  for strings in ([], ["a", ""]):
    with pytest.raises(errors.UserError, match="a stop string is empty"):
      stop.Stops(strings, BYTES)
