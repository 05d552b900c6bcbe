import numpy as np
import pytest

from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import text


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
