import inference_cases as cases
import pytest
import tokenizers

from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import chat, saved
from memcomp.models import decoder


@pytest.fixture(scope="session")
def config() -> decoder.DecoderConfig:
  return cases.small_config()


@pytest.fixture(scope="session")
def model(config) -> decoder.Decoder:
  return cases.build(config)


@pytest.fixture(scope="session")
def owner(model, config) -> saved.Owner:
  return saved.Owner(model, config, tokenizer_lib.ByteTokenizer())


@pytest.fixture
def talk_by(owner, capsys):
  """Runs a chat on some lines; returns it and what it printed.

  A line that is an exception is raised where it would have been typed.
  """

  def run(*lines, opening="", **options):
    rest = iter(lines)

    def ask(prompt):
      line = next(rest, EOFError)
      if isinstance(line, type):
        raise line
      return line

    conversation = chat.Chat(owner, ask=ask, **options)
    conversation.run(opening)
    return conversation, capsys.readouterr().out

  return run


@pytest.fixture(scope="session")
def words(tmp_path_factory):
  """A tokenizer of bytes of UTF-8, pairs of them, and special tokens."""
  vocab = {chr(c): c - 97 for c in range(97, 107)}
  for pair in ("ab", "bc", "cab", "Ã±"):  # the last is ñ, as GPT-2 spells it
    vocab[pair] = len(vocab)
  vocab |= {"Ã": len(vocab), "±": len(vocab) + 1}
  model = tokenizers.models.BPE(vocab, [])
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(["<end>", "<sep>", "<sep>a"])
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
  tokenizer.save(str(path))
  return tokenizer_lib.load(str(path))
