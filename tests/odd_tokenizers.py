"""Tokenizers whose tokens do not spell the text, each with such a text."""

import pathlib
from collections.abc import Callable

from tokenizers import (
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
)


def byte_level() -> Tokenizer:
  """A token for each byte, as GPT-2 spells them."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  return made


def special() -> Tokenizer:
  """With an end of text, whose name may stand in a text."""
  made = byte_level()
  made.add_special_tokens(["<|endoftext|>"])
  return made


def normalised() -> Tokenizer:
  """Takes ligatures apart, two letters for three bytes."""
  made = byte_level()
  made.normalizer = normalizers.NFKC()
  return made


def stripped() -> Tokenizer:
  """Drops the space at the ends of a text."""
  made = byte_level()
  made.normalizer = normalizers.Strip()
  return made


def prefixed() -> Tokenizer:
  """Puts a space before each text."""
  made = byte_level()
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
  return made


def words() -> Tokenizer:
  """Knows two words, no space and no end of text."""
  vocab = {"[UNK]": 0, "hello": 1, "world": 2}
  made = Tokenizer(models.WordLevel(vocab, "[UNK]"))
  made.pre_tokenizer = pre_tokenizers.Whitespace()
  made.add_special_tokens(["[UNK]"])
  return made


def metaspace() -> Tokenizer:
  """Knows two letters, and puts a space before each text."""
  made = Tokenizer(models.BPE({"\u2581": 0, "h": 1, "i": 2}, []))
  made.pre_tokenizer = pre_tokenizers.Metaspace()
  made.decoder = decoders.Metaspace()
  return made


def word_piece() -> Tokenizer:
  """Lower case without accents, as BERT's."""
  vocab = {"[UNK]": 0, "na": 1, "##ive": 2, "end": 3}
  made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
  made.normalizer = normalizers.BertNormalizer()
  made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  made.decoder = decoders.WordPiece()
  return made


CASES: dict[str, tuple[Callable[[], Tokenizer], str]] = {
  "special": (special, "write <|endoftext|> at the end"),
  "normalised": (normalised, "\ufb01ne"),
  "stripped": (stripped, "  fine \n"),
  "prefixed": (prefixed, "fine"),
  "words": (words, "hello unseen world"),
  "metaspace": (metaspace, "hi"),
  "word_piece": (word_piece, "Naïve, the END"),
}


def save(made: Tokenizer, folder: pathlib.Path) -> str:
  """Writes a tokenizer.json; returns its path."""
  path = str(folder / "tokenizer.json")
  made.save(path)
  return path
