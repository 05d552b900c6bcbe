"""From a checkpoint of another library to a run that training goes on with."""

import contextlib
import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.convert import convert
from memcomp.data.synthetic import recall
from memcomp.evaluation import load
from memcomp.export import huggingface, names
from memcomp.layers import linear_attention
from memcomp.models import abstract
from memcomp.runs import workdir as workdir_lib
from memcomp.training import checkpoint
from memcomp.training import run as run_lib
from memcomp.training import state as state_lib

ROOT = pathlib.Path(__file__).parents[2]
LLAMA = ROOT / "tests" / "export" / "data" / "llama"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """A Llama with a tokenizer of characters."""
  import tokenizers

  folder = tmp_path_factory.mktemp("source")
  shutil.copytree(LLAMA, folder / "llama")
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(
      {chr(80 + i): i for i in range(48)}, unk_token="a"
    )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
  tokenizer.save(str(folder / "llama" / "tokenizer.json"))
  (folder / "llama" / "chat_template.jinja").write_text(
    "{% for m in messages %}{{ m.content }}.{% endfor %}"
  )
  (folder / "text").mkdir()
  for number in range(20):
    text = "".join(chr(97 + i * number % 23) for i in range(200))
    (folder / "text" / f"{number}.txt").write_text(text)
  return folder


def command(folder, workdir, *flags, program=("-m", "memcomp.convert")):
  return subprocess.run(
    [
      sys.executable,
      *program,
      f"--checkpoint={folder / 'llama'}",
      f"--workdir={workdir}",
      f"--source={folder / 'text'}",
      *flags,
    ],
    env=os.environ
    | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("converted") / "run"
  done = command(
    source,
    workdir,
    "--mixer=linear_attention",
    "--layers=1",
    "--distill_steps=30",
    "--steps=3",
    "--batch_size=2",
    "--sequence_length=16",
    "--learning_rate=1e-3",
  )
  assert done.returncode == 0, done.stderr
  return workdir, done


def test_the_command_says_what_it_does(converted):
  workdir, done = converted
  report = json.loads((workdir / convert.REPORT).read_text())
  assert set(report["validation"]) == {"teacher", "swapped", "distilled"}
  for name, loss in report["validation"].items():
    assert f"{name}: validation loss {loss['nats']:.4f}" in done.stdout
  errors_ = [layers[0] for layers in report["errors"].values()]
  assert len(errors_) == 2  # before the first step, after the last
  assert errors_[-1] < 0.8 * errors_[0]
  assert "layers.1.mixer.value.weight" in report["copied"]
  assert report["layers"] == [1]
  assert report["left"] == []


def test_it_is_a_run(converted):
  workdir, _ = converted
  opened = load.open_checkpoint(workdir)
  assert opened.step == 0
  model = opened.config.model
  assert model.layer_names() == ["attention", "linear_attention"]
  new = model.mixers["linear_attention"]
  assert isinstance(new, linear_attention.LinearAttentionConfig)
  assert new.heads == 4
  # The layer that was left alone, and what is no mixer.
  ours = names.flatten(model, abstract.plain(nnx.split(opened.model)[1]))
  old, params = huggingface.load_params(LLAMA)
  for name, array in names.flatten(old, params).items():
    if not name.startswith("layers.1.mixer."):
      np.testing.assert_array_equal(ours[name], array, name)


def test_it_chats_as_its_source(converted):
  template = load.open_checkpoint(converted[0]).template()
  assert template is not None and template.stop == "."


@pytest.mark.slow
def test_training_goes_on_from_it(converted, tmp_path):
  """By the config file, with the batches after those of the distillation."""
  workdir = shutil.copytree(converted[0], tmp_path / "run")
  get_config = runpy.run_path(str(ROOT / "configs" / "run.py"))["get_config"]
  config = get_config(str(workdir))
  assert config.training.steps == 3
  assert config.training.batch_size == 2
  assert config.optimizer.learning_rate == 1e-3
  config.evaluation.run_after_training = False
  assert run_lib.run(config, workdir) == 0
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  assert json.loads(lines[-1])["step"] == 3
  data = workdir / "checkpoints" / "3" / "data" / "metadata"
  assert json.loads(data.read_text())["step"] == 30 + 3
  assert np.isfinite(json.loads(lines[0])["loss"])


_SHOWS_OVERRIDES = """
from memcomp.convert import __main__, convert
convert.convert = lambda *_, overrides, **__: print(sorted(overrides.items()))
__main__.main()
"""


def test_flags_are_fields_of_the_run(source, tmp_path):
  done = command(
    source,
    tmp_path / "out",
    "--mixer=linear_attention",
    "--steps=3",
    "--validation=held-out",
    program=("-c", _SHOWS_OVERRIDES),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [
    f"[('data.source', '{source / 'text'}'), ('data.validation', 'held-out'),"
    " ('training.steps', 3)]"
  ]


def test_a_llama_is_trained_at_the_length_of_a_new_run(source, monkeypatch):
  """Not at the length of its positions, which is for scoring it."""
  lengths = []

  def stop(config):
    lengths.append(config.data.sequence_length)
    warmups.append(config.optimizer.warmup_steps)
    raise errors.UserError("enough")

  config_of = huggingface.config_of

  def with_a_long_warmup(folder):
    found = config_of(folder)
    found.optimizer.warmup_steps = found.training.steps // 2
    return found

  warmups, fewer = [], {"training.steps": 20}
  monkeypatch.setattr(convert.validate, "check", stop)
  monkeypatch.setattr(huggingface, "config_of", with_a_long_warmup)
  for overrides in ({}, {"data.sequence_length": 16}, fewer):
    with pytest.raises(errors.UserError, match="enough"):
      convert.convert(
        source / "llama", "out", "linear_attention", overrides=overrides
      )
  assert lengths == [256, 16, 256]
  # A shorter run has a shorter warmup; no other field changes by itself.
  assert warmups == [config_lib.TrainingConfig().steps // 2] * 2 + [2]


@pytest.fixture
def config_for(source, monkeypatch):
  """Returns the config of the run that a conversion of a run writes."""
  config_of, found = huggingface.config_of, []

  def stop(config):
    found.append(config)
    raise errors.UserError("enough")

  def made(fields, overrides):
    def trained(folder):
      config = config_of(folder)
      for path, value in fields.items():
        part, field = path.split(".")
        setattr(getattr(config, part), field, value)
      return config

    monkeypatch.setattr(convert.validate, "check", stop)
    monkeypatch.setattr(huggingface, "config_of", trained)
    with pytest.raises(errors.UserError, match="enough"):
      convert.convert(
        source / "llama", "out", "linear_attention", overrides=overrides
      )
    return found[-1]

  return made


def test_another_text_is_validated_on_a_share_of_it(config_for):
  """Not on the text of the run that is converted."""
  trained = {"data.validation": "old.txt", "data.validation_share": 0.0}
  default = config_lib.DataConfig().validation_share
  for fields, overrides, validation, share in (
    (trained, {}, "old.txt", 0.0),
    (trained, {"data.source": "new"}, "", default),
    ({"data.validation_share": 0.3}, {"data.source": "new"}, "", 0.3),
    (
      trained,
      {"data.source": "new", "data.validation": "held-out"},
      "held-out",
      0.0,
    ),
  ):
    data = config_for(fields, overrides).data
    assert (data.validation, data.validation_share) == (validation, share)


def test_a_run_of_a_task_takes_no_text(config_for, source):
  task = recall.RecallConfig()
  assert config_for({"data.task": task}, {}).data.task == task
  for flag in ("source", "validation"):
    with pytest.raises(errors.UserError, match=rf"--{flag}: .* task recall"):
      convert.convert(
        source / "llama",
        "out",
        "linear_attention",
        overrides={f"data.{flag}": "new"},
      )


def test_the_new_run_begins_from_the_conversion(config_for):
  """Not from what the converted run itself began from."""
  began = {
    "training.init_from": "base",
    "training.init_partially": True,
    "training.keep_optimizer": True,
  }
  training = config_for(began, {}).training
  assert training.init_from == ""
  assert not training.init_partially and not training.keep_optimizer


def test_no_run_is_no_config():
  get_config = runpy.run_path(str(ROOT / "configs" / "run.py"))["get_config"]
  with pytest.raises(errors.UserError, match="FOLDER"):
    get_config()
  with pytest.raises(errors.UserError, match="give the folder of a run"):
    get_config("nowhere")


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ({"mixer": "telis"}, "is no mixer"),
    ({"layers": [2]}, "give some of 0 to 1"),
    ({"layers": []}, "give some of 0 to 1"),
    ({"distill_steps": -1}, "--distill_steps=-1: give 0 or more"),
    ({"overrides": {"training.steps": 0}}, "training.steps = 0"),
    ({"source": "nowhere"}, "no checkpoint"),
  ],
)
def test_mistakes_are_told_and_leave_nothing(source, tmp_path, flags, message):
  arguments = {
    "source": source / "llama",
    "workdir": tmp_path / "out",
    "mixer": "linear_attention",
    **flags,
  }
  with pytest.raises(errors.UserError, match=message):
    convert.convert(**arguments)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_last_step_that_diverges_is_told(source, tmp_path):
  with pytest.raises(errors.UserError, match="diverged at step 1"):
    convert.convert(
      source / "llama",
      tmp_path / "out",
      "linear_attention",
      distill_steps=1,
      distill_learning_rate=1e38,
      overrides={
        "data.source": str(source / "text"),
        "data.sequence_length": 16,
        "training.batch_size": 2,
      },
    )
  assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(source, converted):
  workdir, _ = converted
  before = (workdir / "config.json").read_text()
  with pytest.raises(errors.UserError, match="is there already"):
    convert.convert(source / "llama", workdir, "linear_attention")
  assert (workdir / "config.json").read_text() == before


@pytest.mark.slow
def test_interrupted_it_leaves_nothing(source, tmp_path, monkeypatch, capsys):
  def interrupt(*unused, **more):
    raise KeyboardInterrupt

  monkeypatch.setattr(convert.validation, "make", interrupt)
  with pytest.raises(KeyboardInterrupt):
    convert.convert(
      source / "llama",
      tmp_path / "out",
      "trellis",
      overrides={
        "data.source": str(source / "text"),
        "data.sequence_length": 16,
        "training.batch_size": 2,
      },
    )
  assert not list(tmp_path.iterdir())
  # Query and key are one there, and what had no place has been named.
  said = "without a place in the new ones: projection.query.weight"
  assert said in capsys.readouterr().out.splitlines()


def test_a_written_config_is_whole(converted):
  saved = json.loads((converted[0] / "config.json").read_text())
  opened = load.open_checkpoint(converted[0])
  assert config_lib.to_dict(opened.config) == saved


@pytest.mark.slow
def test_a_run_that_carries_its_state(source, tmp_path):
  """The rows' states are of the new memory, and begin as it begins."""
  convert.convert(
    source / "llama",
    tmp_path / "out",
    "linear_attention",
    distill_steps=0,
    overrides={
      "data.source": str(source / "text"),
      "data.sequence_length": 16,
      "data.packing": "stream",
      "training.batch_size": 2,
      "training.carry_state": True,
    },
  )
  config = workdir_lib.saved_config(tmp_path / "out")
  mesh = sharding.make_mesh(config.mesh)
  target = state_lib.abstract_state(config, mesh)
  checkpoints = checkpoint.Checkpoints(tmp_path / "out", keep=1)
  with contextlib.closing(checkpoints):
    found = checkpoints.restore(target, lambda meta: None)
  assert found.step == 0
  sizes = [x.size for x in jax.tree.leaves(found.state.carry)]
  assert sum(sizes) > 2 * 2 * 4 * 8 * 8
