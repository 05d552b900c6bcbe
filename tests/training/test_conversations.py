"""Fine-tuning on conversations, then talking with the result."""

import builtins
import json
import shutil

import numpy as np
import pytest
import rotation
import training_cases

from memcomp import errors, sharding
from memcomp.data import batch as batch_lib
from memcomp.data import loader, prepare, sources
from memcomp.evaluation import load
from memcomp.evaluation import run as evaluation
from memcomp.export import write
from memcomp.layers import registry
from memcomp.training import compare, run, state, step

# What the user says, and what the model learns to answer.
TALKS = (
  (("hi", "hello"),),
  (("who?", "a tiny model"), ("bye", "see you")),
)
JINJA = """\
{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}
{% if add_generation_prompt %}a:{% endif %}"""


@pytest.fixture
def talks(tmp_path):
  """A file of conversations."""
  path = tmp_path / "talks.jsonl"
  lines = [
    [
      {"role": role, "content": content}
      for turn in talk
      for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    for talk in TALKS
  ]
  path.write_text("".join(json.dumps({"messages": x}) + "\n" for x in lines))
  return str(path)


def tuned(source, *, packing="first_fit", **training):
  """The flags of a user: --config.data.format=messages and so on."""
  config = training_cases.tiny(source, **training)
  config.data.validation = source
  config.data.format = "messages"
  config.data.packing = packing
  config.data.sequence_length = 192
  return config


def losses(folder):
  return [record["loss"] for record in training_cases.curve(folder)]


@pytest.mark.slow  # three programs
def test_fine_tuned_from_a_run_and_talked_to(
  tmp_path, text, talks, capsys, monkeypatch
):
  def learns(config):
    # A third of Trellis's program; what is learned is beside the memory.
    config.model.mixers["memory"] = registry.config_of("linear_attention")(
      heads=2, key_dim=8, value_dim=8
    )
    config.model.embedding_std, config.model.init_std = 0.3, 0.1
    config.model.embedding_convolution = 4
    config.optimizer.learning_rate = 1e-2
    config.optimizer.weight_decay = 0.0
    return config

  base = learns(training_cases.tiny(text, steps=3, batch_size=2))
  assert run.run(base, tmp_path / "base") == 0
  config = learns(tuned(talks, steps=80, batch_size=2, evaluate_every=80))
  config.training.init_from = str(tmp_path / "base")
  config.training.checkpoint_every = 80
  config.evaluation.run_after_training = True
  assert run.run(config, tmp_path / "run") == 0
  found = losses(tmp_path / "run")
  assert found[19] < 0.1 * found[0] and found[-1] < 0.02
  last = training_cases.curve(tmp_path / "run")[-1]
  # All answers with their ends, which are 10 bytes each.
  answers = sum(len(a) + 10 for talk in TALKS for _, a in talk)
  assert last["validation_loss"] < 0.02
  out = capsys.readouterr().out
  assert f"the {answers} bytes of the answers in 2 conversations" in out
  assert "talk to it: memcomp chat --checkpoint=" in out

  # The answers are learned, also after export, and end by themselves.
  write.export(tmp_path / "run", tmp_path / "exported")
  said = ["who?", "bye", "/new", "hi"]
  replies = []
  for folder in ("run", "exported"):
    lines = iter(said)
    monkeypatch.setattr(
      builtins, "input", lambda _, lines=lines: next(lines, "/quit")
    )
    evaluation.run(tmp_path / folder, "chat", overrides={"temperature": 0.0})
    shown = capsys.readouterr().out.splitlines()
    replies.append([x for x in shown[2:] if not x.startswith("[")])
  assert replies == [["a tiny model", "see you", "hello"]] * 2

  # Scored again by hand: windows are rows, so the validation loss agrees.
  evaluation.run(tmp_path / "run", "perplexity")
  path = tmp_path / "run/eval/perplexity.json"
  measured = json.loads(path.read_text())["perplexity"]["trained_length"]
  assert measured["tokens"] == measured["bytes"] == answers
  np.testing.assert_allclose(
    measured["nats"] / answers, last["validation_loss"], rtol=1e-3
  )
  with pytest.raises(errors.UserError, match="--lengths means nothing to conv"):
    evaluation.run(tmp_path / "run", "perplexity", overrides={"lengths": 4})
  with pytest.raises(errors.UserError, match="which are not compared"):
    compare.compare(tmp_path)


@pytest.mark.usefixtures("leaky_model")
@pytest.mark.parametrize(
  "packing",
  rotation.cases(["first_fit", "concat", "stream"], ["first_fit"]),
)
def test_resumed_and_prepared_runs_are_the_same(
  tmp_path, talks, packing, capsys
):
  """To the last bit, with states passed on as well."""
  more = {"state_passing": 0.4, "carry_state": packing == "stream"}
  config = tuned(talks, packing=packing, keep_checkpoints=9, **more)
  config.data.sequence_length = 64
  assert run.run(config, tmp_path / "whole") == 0
  expected = training_cases.curve(tmp_path / "whole")
  assert len(expected) == 8
  shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
  for number in (6, 8):
    shutil.rmtree(tmp_path / f"stopped/checkpoints/{number}")
  assert run.run(config, tmp_path / "stopped") == 0
  assert "going on from step 3" in capsys.readouterr().out
  assert training_cases.curve(tmp_path / "stopped") == expected
  prepare.prepare(talks, str(tmp_path / "shards"), format="messages")
  config.data.source = config.data.validation = str(tmp_path / "shards")
  assert run.run(config, tmp_path / "prepared") == 0
  assert training_cases.curve(tmp_path / "prepared") == expected


@pytest.mark.usefixtures("leaky_model")
def test_a_run_keeps_its_template(tmp_path, talks):
  """The tokenizer's folder may go, or be called otherwise."""
  spec = {"chat_template": JINJA, "eos_token": "</s>"}
  file = tmp_path / "tokenizer_config.json"
  file.write_text(json.dumps(spec))
  config = tuned(talks, steps=3)
  config.data.chat_template = str(file)
  assert run.run(config, tmp_path / "run") == 0
  file.rename(tmp_path / "renamed.json")
  write.export(tmp_path / "run", tmp_path / "exported")
  for folder in ("run", "exported"):
    template = load.open_checkpoint(tmp_path / folder).template()
    assert template is not None and template.stop == "</s>"
  config.data.chat_template = str(tmp_path / "renamed.json")
  assert run.run(config, tmp_path / "run") == 0
  plain = load.open_checkpoint(tmp_path / "run")._replace(meta={})
  assert plain.template() is None


@pytest.mark.usefixtures("leaky_model")
def test_a_run_from_another_keeps_its_template(tmp_path, text, talks):
  """If it reads text; conversations of its own are written by its own."""
  assert run.run(tuned(talks, steps=3), tmp_path / "talks") == 0
  config = training_cases.tiny(text, init_from=str(tmp_path / "talks"))
  config.training.keep_checkpoints = 9
  assert run.run(config, tmp_path / "longer") == 0
  shutil.rmtree(tmp_path / "longer/checkpoints/8")
  assert run.run(config, tmp_path / "longer") == 0  # it is resumed
  template = load.open_checkpoint(tmp_path / "longer").template()
  assert template is not None and template.spec["name"] == "chatml"
  file = tmp_path / "tokenizer_config.json"
  file.write_text(json.dumps({"chat_template": JINJA, "eos_token": "</s>"}))
  config = tuned(talks, steps=3, init_from=str(tmp_path / "longer"))
  config.data.chat_template = str(file)
  assert run.run(config, tmp_path / "again") == 0
  template = load.open_checkpoint(tmp_path / "again").template()
  assert template is not None and template.stop == "</s>"


@pytest.mark.usefixtures("leaky_model")
def test_conversations_do_not_see_one_another(talks):
  """Those of a row are scored as each alone."""
  config = tuned(talks)
  config.data.sequence_length = 256
  store = sources.open_split(config.data, "train")
  with loader.make_loader(
    config.data, store, batch_size=1, shuffle=False
  ) as batches:
    (packed,) = batches
  mesh = sharding.make_mesh(config.mesh)
  params = state.initial_state(config, mesh).params
  validate = step.make_validation_step(config)
  ids = packed.segment_ids[0]
  assert set(ids) == {0, 1, 2}
  alone = [
    batch_lib.Batch(*(x[:, ids == number] for x in packed)) for number in (1, 2)
  ]
  found, *expected = (
    validate(params, batch, None)[0] for batch in (packed, *alone)
  )
  for name in ("nll", "tokens", "bytes"):
    total = sum(float(sums[name]) for sums in expected)
    np.testing.assert_allclose(found[name], total, rtol=1e-6)
  assert found["tokens"] == sum(len(a) + 10 for t in TALKS for _, a in t)
