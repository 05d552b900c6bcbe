"""A new run begins from the parameters of another one."""

import copy
import json
import pathlib
import shutil

import jax
import leaky
import numpy as np
import pytest
import training_cases

from memcomp import config as config_lib
from memcomp import errors, integrity, sharding
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import load
from memcomp.export import names, write
from memcomp.layers import softmax_attention
from memcomp.models import abstract, decoder
from memcomp.runs import load as load_lib
from memcomp.training import checkpoint, init_from, run, state

BYTES = tokenizer_lib.ByteTokenizer()


@pytest.fixture(autouse=True)
def _fast_model(request):
  if "real_model" not in request.fixturenames:
    request.getfixturevalue("leaky_model")


@pytest.fixture
def real_model():
  """The test needs the layers of the real decoder."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  return training_cases.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
  """A run of three steps, and its config."""
  config = training_cases.tiny(text, steps=3)
  folder = tmp_path_factory.mktemp("trained") / "run"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(decoder, "Decoder", leaky.Decoder)
    assert run.run(config, folder) == 0
  return folder, config


@pytest.fixture
def source(trained, tmp_path):
  """A copy of it that a test may write into, and its config."""
  folder, config = trained
  return shutil.copytree(folder, tmp_path / "source"), copy.deepcopy(config)


def _config(text, folder, **training):
  training.setdefault("steps", 3)
  return training_cases.tiny(text, init_from=str(folder), **training)


def _begin(config):
  mesh = sharding.make_mesh(config.mesh)
  with jax.set_mesh(mesh):
    return init_from.begin(config, mesh, BYTES)


def _equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def _moments(state):
  leaves = jax.tree.leaves(state.opt_state, is_leaf=init_from._are_moments)
  return [x for x in leaves if init_from._are_moments(x)]


def _meta(folder):
  return load_lib.read(folder).meta


def test_lengths_one_command_each(tmp_path, source, text, capsys):
  folder, _ = source
  for length in (64, 256):  # Of 16: as 2k, then 8k, then 32k.
    config = _config(text, folder)
    config.data.sequence_length = length
    trained = load_lib.read(folder).params
    begun = _begin(config)
    _equal(begun.state.params, trained)
    longer = tmp_path / str(length)
    assert run.run(config, longer) == 0
    record = _meta(longer)["init_from"]
    assert record == begun.record
    assert record["path"] == str(folder) and record["step"] == 3
    files = json.loads((folder / "checkpoints/3/sha256.json").read_text())
    assert record["sha256"] == integrity.digest(folder / "checkpoints/3")
    assert "params" in str(files)
    assert f"sha256 {record['sha256'][:16]}" in capsys.readouterr().out
    assert training_cases.curve(longer)[0]["step"] == 1
    folder = longer


@pytest.mark.parametrize(
  "changes",
  [  # together where they do not meet
    {
      "data.packing": "first_fit",
      "data.seed": 5,
      "optimizer.clip_norm": 0.0,
      "optimizer.schedule": "constant_then_decay",
    },
    {"optimizer.name": "muon", "mesh.fsdp": 4},
    {"training.state_passing": 0.5, "model.dtype": "bfloat16"},
  ],
  ids=lambda changes: "+".join(x.partition(".")[2] for x in changes),
)
def test_everything_but_the_model_may_differ(source, text, changes):
  folder, _ = source
  config = _config(text, folder, batch_size=8)
  for path, value in changes.items():
    group, field = path.split(".")
    setattr(getattr(config, group), field, value)
  begun = _begin(config)
  _equal(begun.state.params, load_lib.read(folder).params)
  mesh = sharding.make_mesh(config.mesh)
  like = state.abstract_state(config, mesh)
  assert jax.tree.structure(begun.state) == jax.tree.structure(like)
  for made, wanted in zip(
    jax.tree.leaves(begun.state), jax.tree.leaves(like), strict=True
  ):
    assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
    assert made.sharding.is_equivalent_to(wanted.sharding, made.ndim)
  assert int(begun.state.step) == 0
  moments = _moments(begun.state)
  assert len(moments) == (2 if config.optimizer.name == "muon" else 1)
  for x in moments:
    assert int(x.count) == 0
    assert not any(map(np.any, jax.tree.leaves(x.mu)))
  # A carry starts from the learned memory of the source.
  if begun.state.carry is not None:
    start = begun.state.params["start"]
    np.testing.assert_array_equal(begun.state.carry.memory[:, 0], start)


@pytest.mark.parametrize("name", ["export", "3"])  # 3 is no step
def test_from_an_export(tmp_path, source, text, name):
  folder, _ = source
  out = write.export(folder, tmp_path / name, format="orbax")
  begun = _begin(_config(text, out))
  _equal(begun.state.params, load_lib.read(folder).params)
  assert begun.record["sha256"] == integrity.digest(out)
  assert load.config_of(out).data.source == text
  config = _config(text, out, keep_optimizer=True)
  for config.optimizer.name in ("adamw", "muon"):
    with pytest.raises(errors.UserError, match="holds no optimizer"):
      _begin(config)


def test_a_home_in_a_config_is_expanded(tmp_path, source, text, monkeypatch):
  folder, _ = source
  monkeypatch.setenv("HOME", str(tmp_path))
  begun = _begin(_config(text, "~/source", keep_optimizer=True))
  assert begun.record["path"] == str(folder)
  assert begun.record["optimizer"] == "kept"
  (kept,) = _moments(begun.state)
  assert int(kept.count) == 3
  assert all(np.any(x) for x in jax.tree.leaves(kept.mu))


def test_a_run_goes_on_from_its_own_checkpoint(tmp_path, source, text):
  folder, _ = source
  config = _config(text, folder, steps=6, keep_checkpoints=9)
  assert run.run(config, tmp_path / "new") == 0
  whole = training_cases.curve(tmp_path / "new")
  record = _meta(tmp_path / "new")["init_from"]
  shutil.rmtree(tmp_path / "new/checkpoints/6")
  shutil.rmtree(folder)  # It is not read again.
  assert run.run(config, tmp_path / "new") == 0
  assert training_cases.curve(tmp_path / "new") == whole
  assert _meta(tmp_path / "new")["init_from"] == record


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizer_is_kept_on_request(tmp_path, text, name):
  old = training_cases.tiny(text, steps=3)
  old.optimizer.name = name
  folder = tmp_path / "source"
  assert run.run(old, folder) == 0
  config = _config(text, folder, keep_optimizer=True)
  config.optimizer.name = name
  config.optimizer.clip_norm = 0.0  # Another chain around the same moments.
  begun = _begin(config)
  mesh = sharding.make_mesh(old.mesh)
  saved = checkpoint.Checkpoints(folder, keep=1)
  restored = saved.restore(state.abstract_state(old, mesh), lambda meta: None)
  saved.close()
  kept = _moments(begun.state)
  assert len(kept) == (1 if name == "adamw" else 2)  # Muon's and Adam's
  _equal(kept, _moments(restored.state))
  assert all(int(x.count) == 3 for x in kept)
  # The schedule's own count is back at the start.
  assert sorted(
    int(x) for x in jax.tree.leaves(begun.state.opt_state) if (x.ndim == 0)
  ) == [0] + len(kept) * [3]
  assert begun.record["optimizer"] == "kept"
  assert run.run(config, tmp_path / "new") == 0
  config.optimizer.name = "muon" if name == "adamw" else "adamw"
  with pytest.raises(errors.UserError, match=f"are of {name}, and"):
    _begin(config)


def test_what_does_not_fit_is_named(source, text):
  folder, _ = source
  config = _config(text, folder)
  config.model.vocab_size = 300
  with pytest.raises(errors.UserError) as caught:
    _begin(config)
  message = str(caught.value)
  assert "embedding.weight [256, 32], here [300, 32]" in message
  assert "--init_partially" in message and "\n" not in message
  config.training.init_partially = True
  begun = _begin(config)
  assert begun.record["fresh"] == begun.record["left_out"]
  assert begun.record["fresh"] == ["embedding.weight"]
  trained = load_lib.read(folder).params
  np.testing.assert_array_equal(begun.state.params["read"], trained["read"])
  shown = init_from.describe(begun.record)
  assert "1 arrays start fresh: embedding.weight" in shown
  assert "vocab_size was 256, is 300" in shown


def test_a_folder_is_free_after_a_start_that_failed(tmp_path, source, text):
  """The corrected command may have it; so may quite another run."""
  wrong = _config(text, tmp_path / "absent")
  right = _config(text, source[0])
  right.optimizer.learning_rate *= 2
  with pytest.raises(errors.UserError, match="no checkpoint in"):
    run.run(wrong, tmp_path / "new")
  assert run.run(right, tmp_path / "new") == 0
  with pytest.raises(errors.UserError, match="another config"):
    run.run(wrong, tmp_path / "new")
  assert run.run(right, tmp_path / "new") == 0


def test_nothing_to_read(tmp_path, text):
  with pytest.raises(errors.UserError, match="no checkpoint in"):
    _begin(_config(text, tmp_path / "absent"))


def test_another_tokenizer_does_not_fit(source, text, monkeypatch):
  folder, _ = source
  monkeypatch.setattr(BYTES, "fingerprint", "another", raising=False)
  with pytest.raises(
    errors.UserError, match=r"another tokenizer.*embedding.weight"
  ):
    _begin(_config(text, folder))
  begun = _begin(_config(text, folder, init_partially=True))
  assert begun.record["fresh"] == ["embedding.weight"]


def _attention(layers, mixers, pattern):
  config = config_lib.Config(name="attention")
  config.model = decoder.DecoderConfig(
    d_model=16,
    num_layers=layers,
    mlp_dim=16,
    mixers={
      name: softmax_attention.SoftmaxAttentionConfig(heads=2) for name in mixers
    },
    pattern=pattern,
  )
  return config


@pytest.mark.slow
def test_layers_are_found_by_depth_whatever_they_are_called(
  real_model, tmp_path
):
  old = _attention(4, ["a"], "a*4")
  mesh = sharding.one_device()
  params = state.initial_state(old, mesh).params
  zero = np.int32(0)
  saved = checkpoint.Checkpoints(tmp_path, keep=1)
  like = state.TrainState(params, {"count": zero}, zero, zero, zero, None)
  saved.save(7, like, {}, run.make_meta(old, BYTES, params))
  saved.close()
  new = _attention(5, ["a", "b"], "a,b,a,b,b")
  new.seed = 1
  new.training.init_from = str(tmp_path)
  with pytest.raises(
    errors.UserError,
    match=r"missing in the source: layers.4.mixer.*and \d+ more",
  ):
    _begin(new)
  new.training.init_partially = True
  begun = _begin(new)
  assert all(name.startswith("layers.4.") for name in begun.record["fresh"])
  assert not begun.record["left_out"]
  theirs = names.flatten(old.model, params)
  mine = names.flatten(new.model, begun.state.params)
  for name, array in theirs.items():
    np.testing.assert_array_equal(mine[name], array, err_msg=name)
  assert mine.keys() - theirs.keys() == set(begun.record["fresh"])


@pytest.mark.slow
def test_from_a_checkpoint_of_hugging_face(real_model, tmp_path):
  data = pathlib.Path(__file__).parents[1] / "export/data/llama"
  folder = shutil.copytree(data, tmp_path / "llama")
  tokenizers = pytest.importorskip("tokenizers")
  words = tokenizers.models.WordLevel(
    {chr(65 + i): i for i in range(48)}, unk_token="A"
  )
  tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
  config = load.config_of(folder)
  config.training.init_from = str(folder)
  mesh = sharding.one_device()
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  with jax.set_mesh(mesh):
    begun = init_from.begin(config, mesh, tokenizer)
    hidden, _ = abstract.merge(
      abstract.model_of(config.model).graphdef, begun.state.params
    ).hidden(np.load(data / "tokens.npy"))
  assert begun.record["changes"] == []
  opened = load.open_checkpoint(folder)
  wanted, _ = opened.model.hidden(np.load(data / "tokens.npy"))
  np.testing.assert_array_equal(hidden, wanted)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"keep_optimizer": True}, "keep_optimizer means nothing without"),
    ({"init_partially": True}, "init_partially means nothing without"),
    (
      {"init_from": "x", "init_partially": True, "keep_optimizer": True},
      "leave one of them out",
    ),
  ],
)
def test_settings_that_must_agree(text, tmp_path, fields, message):
  config = training_cases.tiny(text, **fields)
  with pytest.raises(errors.UserError, match=message):
    run.run(config, tmp_path / "a")
  assert not (tmp_path / "a").exists()


@pytest.mark.slow  # Three processes.
def test_the_documented_commands(tmp_path):
  config = training_cases.write_config(tmp_path, training_cases.LEAKY)
  assert training_cases.train(config, tmp_path / "16")[0] == 0
  code, out, err = training_cases.train(
    config,
    tmp_path / "64",
    f"--init_from={tmp_path / '16'}",
    "--keep_optimizer",
    "--config.data.sequence_length=64",
  )
  assert code == 0, err
  assert f"from {tmp_path / '16'}, step 8" in out and "optimizer kept" in out
  code, _, err = training_cases.train(
    config, tmp_path / "no", "--keep_optimizer"
  )
  assert code == 2 and "means nothing without --init_from" in err
