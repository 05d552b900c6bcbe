"""Text to ids and back, in one go and token by token."""

import builtins
import json

import numpy as np
import odd_tokenizers
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import stop

TEXT = "Grüße, 世界! naïve 😀 <tab>\t\r\n end"


def byte_level(tmp_path):
  built = tokenizers.Tokenizer(tokenizers.models.BPE())
  built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  built.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<|end|>"],
    show_progress=False,
  )
  built.train_from_iterator([TEXT, "the end of the naïve world"], trainer)
  path = tmp_path / "tokenizer.json"
  built.save(str(path))
  return str(path)


def byte_fallback(tmp_path):
  vocab = {f"<0x{b:02X}>": b for b in range(256)}
  vocab |= {"▁": 256, "a": 257, "b": 258, "ab": 259, "▁ab": 260}
  built = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab=vocab, merges=[("a", "b"), ("▁", "ab")], byte_fallback=True
    )
  )
  built.normalizer = tokenizers.normalizers.Replace(" ", "▁")
  built.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("▁", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  path = tmp_path / "fallback.json"
  built.save(str(path))
  return str(path)


def make(kind, tmp_path):
  makers = {"byte_level": byte_level, "byte_fallback": byte_fallback}
  name = makers[kind](tmp_path) if kind in makers else kind
  return tokenizer_lib.load(name)


KINDS = ["bytes", "byte_level", "byte_fallback"]


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind, tmp_path):
  tokenizer = make(kind, tmp_path)
  ids = tokenizer.encode(TEXT)
  assert tokenizer.decode(ids) == TEXT
  np.testing.assert_array_equal(ids, tokenizer.encode_bytes(TEXT.encode()))
  assert ids.dtype == tokenizer.dtype
  assert ids.max() < tokenizer.vocab_size
  assert len(tokenizer.encode("")) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_sums_to_the_text(kind, tmp_path):
  tokenizer = make(kind, tmp_path)
  ids = tokenizer.encode(TEXT)
  assert tokenizer.bytes_of(ids).sum() == len(TEXT.encode())
  assert tokenizer.bytes_of(ids.reshape(1, -1)).shape == (1, len(ids))
  joined = b"".join(tokenizer.token_bytes(int(i)) for i in ids)
  assert joined == TEXT.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_equals_decoding(kind, tmp_path):
  tokenizer = make(kind, tmp_path)
  decoder = stop.Text(tokenizer)
  pushed = [decoder.push(i) for i in tokenizer.encode(TEXT)]
  assert "".join(pushed) == TEXT
  assert "\ufffd" not in "".join(pushed)
  assert decoder.finish() == ""


def spelled(tokens, tmp_path, decoder=None, pre_tokenizer=None):
  """A tokenizer with these tokens."""
  vocab = {token: number for number, token in enumerate(tokens)}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, tokens[0]))
  if decoder:
    made.decoder = decoder
  if pre_tokenizer:
    made.pre_tokenizer = pre_tokenizer
  return tokenizer_lib.load(odd_tokenizers.save(made, tmp_path))


def streamed(tokenizer, *stop_strings):
  """What is shown of all tokens in turn, and whether a stop string came."""
  stops = stop.make(stop_strings, tokenizer)
  decoder = stop.Text(tokenizer, stops)
  pushed = [decoder.push(i) for i in range(tokenizer.vocab_size)]
  return "".join(pushed) + decoder.finish(), decoder.stopped


@pytest.mark.parametrize(
  ("tokens", "decoder"),
  [
    (["hel", "lo</w>", "big</w>", "world</w>"], decoders.BPEDecoder()),
    (
      ["hel", "lo@", "big@", "world@"],
      decoders.Sequence([decoders.BPEDecoder("@"), decoders.Fuse()]),
    ),
    (["_hel", "lo", "_big", "_world"], decoders.Metaspace("_")),
    (["hello", "big", "world"], None),
    (["hel", "##lo", "big", "##ger", ",", "world"], decoders.WordPiece()),
    (["hel", "&&lo", "big", "world"], decoders.WordPiece("&&")),
    (
      ["~hel", "lo", "~big", "<0xC3>", "<0xA9>", "~world"],
      decoders.Sequence(
        [
          decoders.Replace("~", " "),
          decoders.ByteFallback(),
          decoders.Fuse(),
          decoders.Strip(" ", 1, 0),
        ]
      ),
    ),
  ],
)
def test_the_text_is_as_the_library_decodes_it(tokens, decoder, tmp_path):
  tokenizer = spelled(tokens, tmp_path, decoder)
  text = tokenizer.decode(range(len(tokens)))
  assert text.startswith("hello big") and text.endswith(" world")
  # Each word brings its space along, as it does after a prompt.
  assert streamed(tokenizer)[0].strip() == text
  before, stopped = streamed(tokenizer, "llo big")
  assert (before.strip(), stopped) == ("he", True)


@pytest.mark.parametrize(
  ("tokens", "pre_tokenizer"),
  [
    (["_hello", "_big", "_world"], pre_tokenizers.Metaspace("_")),
    (["Ġhello", "Ġbig", "Ġworld"], pre_tokenizers.ByteLevel()),
  ],
)
def test_tokens_with_spaces_need_no_decoder(tokens, pre_tokenizer, tmp_path):
  tokenizer = spelled(tokens, tmp_path, pre_tokenizer=pre_tokenizer)
  assert streamed(tokenizer, "hello world") == (" hello big world", False)


def test_added_tokens_are_shown_as_all_others(tmp_path):
  tokenizer = spelled(["_hello", "_big"], tmp_path, decoders.Metaspace("_"))
  made = tokenizers.Tokenizer.from_file(tokenizer.name)
  made.add_tokens(["_world"])
  made.add_special_tokens(["_<end>"])
  tokenizer = tokenizer_lib.load(odd_tokenizers.save(made, tmp_path))
  assert streamed(tokenizer) == (" hello big world", False)


def test_streaming_waits_for_a_whole_character():
  decoder = stop.Text(tokenizer_lib.load("bytes"))
  assert [decoder.push(b) for b in "é€".encode()] == ["", "é", "", "", "€"]
  decoder.push("€".encode()[0])
  assert decoder.finish() == "\ufffd"


def test_broken_bytes_do_not_stop_the_stream():
  decoder = stop.Text(tokenizer_lib.load("bytes"))
  pushed = [decoder.push(b) for b in b"a\xffb\xe2c"]
  assert "".join(pushed) == "a\ufffdb\ufffdc"


def test_special_tokens_stand_for_no_bytes(tmp_path):
  tokenizer = tokenizer_lib.load(byte_level(tmp_path))
  vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"][
    "vocab"
  ]
  special = vocab["<|end|>"]
  assert tokenizer.bytes_of([special]).tolist() == [0]
  assert stop.Text(tokenizer).push(special) == ""


@pytest.mark.parametrize("name", odd_tokenizers.CASES)
def test_ids_of_a_text_share_its_bytes(name, tmp_path):
  make, text = odd_tokenizers.CASES[name]
  tokenizer = tokenizer_lib.load(odd_tokenizers.save(make(), tmp_path))
  ids = tokenizer.encode(text)
  sizes = tokenizer.bytes_of(ids)
  assert sizes.sum() == len(text.encode())
  assert sizes.shape == ids.shape and sizes.dtype == np.int32
  # What the tokens spell is something else, and all that a part has.
  spelled = [len(tokenizer.token_bytes(int(i))) for i in ids]
  assert sum(spelled) != len(text.encode())
  assert tokenizer.bytes_of(ids[:2]).tolist() == spelled[:2]
  assert tokenizer.encode_bytes(text.encode()).tolist() == ids.tolist()


def test_ids_that_spell_their_text_are_a_plain_array(tmp_path):
  tokenizer = tokenizer_lib.load(byte_level(tmp_path))
  assert type(tokenizer.encode(TEXT)) is np.ndarray


def truncation(built):
  built.enable_truncation(16)


def padding(built):
  built.enable_padding(length=4096, pad_id=0, pad_token="!")


def dropout(built):
  built.model.dropout = 0.5


def beginning(built):
  built.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|end|> $A",
    special_tokens=[("<|end|>", built.token_to_id("<|end|>"))],
  )


@pytest.mark.parametrize("switch_on", [truncation, padding, dropout, beginning])
def test_what_a_file_asks_for_beside_ids(switch_on, tmp_path):
  path = byte_level(tmp_path)
  plain = tokenizer_lib.load(path).encode(TEXT * 20).tolist()
  built = tokenizers.Tokenizer.from_file(path)
  switch_on(built)
  built.save(path)
  assert tokenizers.Tokenizer.from_file(path).encode(TEXT * 20).ids != plain
  assert tokenizer_lib.load(path).encode(TEXT * 20).tolist() == plain


def test_a_special_token_can_be_written_in_front_of_a_text(tmp_path):
  """As docs/export.md advises for a beginning of text."""
  tokenizer = tokenizer_lib.load(byte_level(tmp_path))
  first, *rest = tokenizer.encode("<|end|>" + TEXT).tolist()
  assert tokenizer.token_bytes(first) == b""
  assert rest == tokenizer.encode(TEXT).tolist()


def test_fingerprints_tell_tokenizers_apart(tmp_path):
  prints = {make(kind, tmp_path).fingerprint for kind in KINDS}
  assert len(prints) == 3
  assert all(len(p) == 16 for p in prints)


def test_ids_above_255_are_not_wrapped():
  with pytest.raises(ValueError, match="range"):
    tokenizer_lib.load("bytes").decode([256])


def bad(tmp_path, case):
  path = tmp_path / "bad.json"
  if case == "json":
    path.write_text("{")
  elif case == "other json":
    path.write_text('{"a": 1}')
  elif case == "empty vocabulary":
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
  elif case == "joined":
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    made.decoder = decoders.CTC()
    made.save(str(path))
  elif case == "nested":
    path.write_text("[" * 100_000)
  elif case == "far":
    model = tokenizers.models.WordLevel({"a": 0, "b": 1 << 31}, "a")
    tokenizers.Tokenizer(model).save(str(path))
  elif case == "unknown":
    return "bites"
  return str(path)


@pytest.mark.parametrize(
  ("case", "message"),
  [
    ("missing", "cannot read tokenizer"),
    ("json", "not a tokenizer.json"),
    ("other json", "not a tokenizer.json"),
    ("nested", "not a tokenizer.json"),
    ("empty vocabulary", "vocabulary is empty"),
    ("joined", "its decoder does not make text of one token at a time"),
    # The library takes its time for it.
    pytest.param("far", "ids go up to 2147483648", marks=pytest.mark.slow),
    ("unknown", "unknown tokenizer 'bites'"),
  ],
)
def test_bad_tokenizers(case, message, tmp_path):
  with pytest.raises(errors.UserError, match=message) as caught:
    tokenizer_lib.load(bad(tmp_path, case))
  assert "\n" not in str(caught.value)


def test_missing_library(tmp_path, monkeypatch):
  path = byte_level(tmp_path)
  real = builtins.__import__

  def fake(name, *args, **kwargs):
    if name == "tokenizers":
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", fake)
  with pytest.raises(errors.UserError, match=r"pip install 'memcomp\[text\]'"):
    tokenizer_lib.load(path)


def test_lone_surrogate():
  with pytest.raises(errors.UserError, match=r"character 1 .* surrogate"):
    tokenizer_lib.load("bytes").encode("a\ud800")


def test_a_text_that_cannot_be_encoded(tmp_path):
  model = tokenizers.models.WordLevel({"a": 0}, "[UNK]")
  path = odd_tokenizers.save(tokenizers.Tokenizer(model), tmp_path)
  tokenizer = tokenizer_lib.load(path)
  with pytest.raises(errors.UserError, match="cannot encode") as caught:
    tokenizer.encode("b")
  assert "\n" not in str(caught.value)
  with pytest.raises(errors.UserError, match=r"character 1 .* surrogate"):
    tokenizer.encode("a\ud800")


def test_a_signal_while_a_text_is_encoded_is_no_error_of_it(
  tmp_path, monkeypatch
):
  class Library:
    def encode(self, text, **options):
      raise errors.Terminated

  tokenizer = tokenizer_lib.load(
    odd_tokenizers.save(odd_tokenizers.words(), tmp_path)
  )
  monkeypatch.setattr(tokenizer, "_tokenizer", Library())
  with pytest.raises(errors.Terminated):
    tokenizer.encode("a")
