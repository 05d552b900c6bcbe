import json

import numpy as np
import odd_tokenizers
import pytest

from memcomp.data import formats, prepare, sources
from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import perplexity, text
from memcomp.training import loop


@pytest.fixture
def json_tokenizer(tmp_path):
  tokenizers = pytest.importorskip("tokenizers")
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(["the text of the tests → ñ"] * 5, trainer)
  made.save(str(tmp_path / "tokenizer.json"))
  return tokenizer_lib.load(str(tmp_path / "tokenizer.json"))


def test_bytes_of_a_text_in_any_tokenizer(tmp_path, json_tokenizer):
  (tmp_path / "a.txt").write_text("the tests → ñ, and more")
  (tmp_path / "b.txt").write_text("of the text")
  source = str(tmp_path / "*.txt")
  expected = "the tests → ñ, and moreof the text".encode()
  for tokenizer in (json_tokenizer, tokenizer_lib.ByteTokenizer()):
    store = sources.open_source(source, tokenizer)
    found = text.as_bytes(store, tokenizer)
    assert found.dtype == np.uint8
    assert found.tobytes() == expected
    assert text.num_bytes(store, tokenizer) == len(expected)
  assert store.num_tokens > 30
  assert sources.open_source(source, json_tokenizer).num_tokens < 30


def odd(name, folder, documents):
  """The store of some documents, in memory and from shards."""
  make, _ = odd_tokenizers.CASES[name]
  path = odd_tokenizers.save(make(), folder)
  tokenizer = tokenizer_lib.load(path)
  (folder / "text").mkdir()
  for number, document in enumerate(documents):
    (folder / f"text/{number}.txt").write_text(document)
  source, shards = str(folder / "text"), str(folder / "shards")
  prepare.prepare(source, shards, tokenizer=path, shard_tokens=20)
  return tokenizer, [
    sources.open_source(name, tokenizer) for name in (source, shards)
  ]


@pytest.mark.parametrize("name", odd_tokenizers.CASES)
def test_bytes_are_those_of_the_text(name, tmp_path):
  _, sentence = odd_tokenizers.CASES[name]
  documents = [sentence, sentence * 3, "end"]
  expected = len("".join(documents).encode())
  tokenizer, stores = odd(name, tmp_path, documents)
  for store in stores:
    assert text.num_bytes(store, tokenizer) == expected
    stream = text.Stream(store)
    total = store.num_tokens
    ids, sizes = stream.read_sized(tokenizer, 0, total)
    assert ids.tolist() == stream.read(0, total).tolist()
    assert sizes.sum() == pytest.approx(expected, rel=1e-12)
    # However it is cut.
    cuts = [(0, 1), (1, 4), (4, total)]
    parts = [stream.read_sized(tokenizer, *cut)[1] for cut in cuts]
    np.testing.assert_allclose(np.concatenate(parts), sizes, rtol=1e-12)
    # Of one pass over all of it, as training counts them.
    per_token = loop.token_bytes(tokenizer, store)
    assert per_token[ids].sum() == pytest.approx(expected, rel=1e-5)
    found = text.as_bytes(store, tokenizer)
    if found is not None:
      assert found.tobytes().decode() == "".join(documents)
  two, one = (s.store for s in map(text.Stream, stores))
  assert two.sizes.text.tolist() == one.sizes.text.tolist()
  kept = store_lib.Subset(one, np.array([1]))
  joined = store_lib.Concatenation([kept, two])
  assert text.num_bytes(kept, tokenizer) == len(documents[1].encode())
  both = len(documents[1].encode()) + expected
  assert text.num_bytes(joined, tokenizer) == both


def test_text_that_tokens_tell_or_do_not(tmp_path):
  found = {}
  for name, (_, sentence) in odd_tokenizers.CASES.items():
    (tmp_path / name).mkdir()
    tokenizer, (store, _) = odd(name, tmp_path / name, [sentence])
    found[name] = text.as_bytes(store, tokenizer)
  told = {name for name, bytes_ in found.items() if bytes_ is not None}
  assert told == {"special", "metaspace"}


def test_a_store_whose_tokens_spell_the_text_has_no_sizes(
  tmp_path, json_tokenizer
):
  (tmp_path / "a.txt").write_text("the tests → ñ, and more")
  store = sources.open_source(str(tmp_path / "*.txt"), json_tokenizer)
  assert store.sizes is None
  sizes = loop.token_bytes(json_tokenizer, store)
  assert sizes.dtype == np.int32
  assert loop.token_bytes(tokenizer_lib.ByteTokenizer(), store) is None


def test_a_part_with_sizes_does_not_stretch_the_others(tmp_path):
  """Bytes are counted by a part's rows, whether it has sizes or not."""
  tokenizer, (odd_store, _) = odd("special", tmp_path, ["<|endoftext|>" * 50])
  (tmp_path / "plain.txt").write_text("plain " * 20)
  plain = sources.open_source(str(tmp_path / "plain.txt"), tokenizer)
  np.arange(120, dtype="<u2").tofile(tmp_path / "flat.bin")
  flat = sources.open_source(str(tmp_path / "flat.bin"), tokenizer)
  assert plain.sizes is None and flat.sizes is None
  for part in (plain, flat):
    mixed = store_lib.Mixture([part, odd_store], [0.99, 0.01])
    per_token = loop.token_bytes(tokenizer, mixed)
    # A token of the odd part stands for 13 bytes.
    np.testing.assert_allclose(per_token, 0.99 + 0.01 * 13, rtol=1e-6)
    joined = store_lib.Concatenation([part, odd_store])
    per_token = loop.token_bytes(tokenizer, joined)
    expected = (120 + 50 * 13) / (120 + 50)
    np.testing.assert_allclose(per_token, expected, rtol=1e-6)


@pytest.mark.parametrize("marks", [["<|im_start|>", "<|im_end|>"], []])
def test_a_question_does_not_change_the_bytes_of_its_answer(tmp_path, marks):
  """Also where the marks of the template are tokens that spell nothing."""
  made = odd_tokenizers.byte_level()
  made.add_special_tokens(marks)
  name = odd_tokenizers.save(made, tmp_path)
  tokenizer = tokenizer_lib.load(name)
  answer = "Hello there<|im_end|>"
  for number, question in enumerate(("Hi", "Say hello, please. " * 9)):
    path, shards = tmp_path / f"{number}.jsonl", str(tmp_path / f"out{number}")
    turns = [("user", question), ("assistant", "Hello there")]
    talk = {"messages": [{"role": r, "content": c} for r, c in turns]}
    path.write_text(f"{json.dumps(talk)}\n" * 3)
    prepare.prepare(str(path), shards, tokenizer=name, format="messages")
    format = formats.load("messages", "chatml", tokenizer)
    for source in (str(path), shards):
      store = sources.open_source(source, tokenizer, format=format)
      stream = text.Stream(store)
      ids, sizes = stream.read_sized(tokenizer, 0, store.num_tokens)
      scored = stream.scored(0, store.num_tokens)
      per_token = loop.token_bytes(tokenizer, store)
      for found in (
        sizes[scored].sum(),
        scored.sum() if per_token is None else per_token[ids[scored]].sum(),
        text.num_bytes(store, tokenizer),
      ):
        assert found == pytest.approx(3 * len(answer), rel=1e-6)


def test_bits_per_byte_of_a_text_with_unknown_words(tmp_path):
  documents = ["hello unseen world", "hello, you in the world"]
  tokenizer, (store, _) = odd("words", tmp_path, documents)

  def score(state, tokens, length):
    return np.full(tokens[:, 1:].shape, np.log(2.0)), None

  stream = text.Stream(store)
  whole = perplexity.whole_text(score, stream, tokenizer, 4)
  # A bit a token, of all bytes but those of the first token.
  assert whole["tokens"] == store.num_tokens - 1
  _, sizes = stream.read_sized(tokenizer, 0, store.num_tokens)
  expected = len("".join(documents)) - sizes[0]
  assert whole["bytes"] == round(expected)
  assert whole["bits_per_byte"] == pytest.approx(whole["tokens"] / expected)
