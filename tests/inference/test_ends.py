"""An end of text ends what is made, whoever asks for it."""

import importlib.util
import json

import chain_model
import pytest

from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import load
from memcomp.export import write
from memcomp.inference import chat, complete, generate, saved
from memcomp.training import run as run_lib

needs_harness = pytest.mark.skipif(
  importlib.util.find_spec("lm_eval") is None, reason="needs the extra eval"
)


def sample(opened):
  pieces = generate.text(
    opened.model,
    opened.tokenizer,
    "a",
    tokens=6,
    settings=complete.GREEDY,
  )
  return "".join(pieces)


def completed(opened):
  found, _ = complete.complete(
    opened.model,
    opened.tokenizer,
    [opened.tokenizer.encode(text) for text in ("a", "c")],
    tokens=4,
    rows=3,
    stop_strings=["h"],
  )
  return found


@pytest.mark.slow
def test_nothing_is_made_behind_the_end(tmp_path, capsys):
  opened = load.open_checkpoint(chain_model.make(tmp_path / "chain"))
  assert opened.tokenizer.ends == (chain_model.END,)
  assert sample(opened) == "b"
  assert completed(opened) == ["b", "dcdc"]
  owner = saved.Owner(opened.model, opened.config.model, opened.tokenizer)
  lines = iter(["/set stop=g", "/set stop=", ""])

  def ask(prompt):
    line = next(lines, None)
    if line is None:
      raise EOFError
    return line

  talk = chat.Chat(owner, tokens=6, settings=complete.GREEDY, ask=ask)
  talk.run("a")
  assert "\nb\n" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("config", "generation", "ends"),
  [
    ({}, None, (10,)),
    ({"eos_token_id": [10, 7, 10]}, None, (10, 7)),
    ({"eos_token_id": 7}, {"eos_token_id": [10]}, (10,)),
    ({"eos_token_id": 7}, {"eos_token_id": None}, (7,)),
    # By its name, where the config does not say it.
    ({"eos_token_id": None}, {}, (10,)),
    ({"eos_token_id": -1}, {"eos_token_id": [True, "10", 1 << 40]}, (10,)),
    # Ids of the model that its tokenizer has not.
    ({"vocab_size": 16, "eos_token_id": [11, 7]}, {"eos_token_id": 15}, (7,)),
  ],
)
def test_what_a_folder_says_of_the_end(tmp_path, config, generation, ends):
  folder = chain_model.make(tmp_path / "chain", **config)
  if generation is not None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(generation))
  assert load.open_checkpoint(folder).tokenizer.ends == ends


def test_the_end_goes_on_with_the_model(tmp_path):
  # Its name says nothing, so it has to be written down.
  folder = chain_model.make(tmp_path / "chain", special="<stop>")
  opened = load.open_checkpoint(folder)
  meta = run_lib.make_meta(opened.config, opened.tokenizer, {})
  assert meta["ends"] == [chain_model.END]
  write.export(folder, tmp_path / "exported")
  again = load.open_checkpoint(tmp_path / "exported")
  assert again.tokenizer.ends == (chain_model.END,)
  assert sample(again) == "b"


def test_the_end_goes_on_with_training(tmp_path):
  folder = chain_model.make(tmp_path / "chain", special="<stop>")
  (tmp_path / "a.txt").write_text("abcd" * 99)
  config = load.config_of(folder)
  config.data.source = config.data.validation = str(tmp_path / "a.txt")
  config.data.sequence_length = 8
  config.optimizer.warmup_steps = 0
  config.training.steps, config.training.batch_size = 1, 1
  config.training.init_from = str(folder)
  config.evaluation.run_after_training = False
  assert run_lib.run(config, tmp_path / "run") == 0
  again = load.open_checkpoint(tmp_path / "run")
  assert again.tokenizer.ends == (chain_model.END,)
  # Ids of another tokenizer mean something else.
  other = run_lib.make_meta(config, tokenizer_lib.ByteTokenizer(), {})
  run_lib.inherit(other, again.meta)
  assert other["ends"] == []


@pytest.mark.harness
@needs_harness
def test_the_harness_stops_at_the_end(tmp_path):
  from lm_eval.api import instance

  from memcomp.evaluation import harness_model

  model = harness_model.Model(
    load.open_checkpoint(chain_model.make(tmp_path / "chain")), rows=1
  )
  given = {"until": ["\n"], "max_gen_toks": 8}
  request = instance.Instance("generate_until", {}, ("a", given), 0)
  assert model.generate_until([request]) == ["b"]
  assert model.prefix_token_id == chain_model.END
