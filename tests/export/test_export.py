"""What is exported is what was trained, bit for bit, or is not there."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import rotation
import runs
from flax import nnx
from safetensors import numpy as safetensors

from memcomp import cli, disk, errors, sharding
from memcomp import config as config_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.data.synthetic import recall
from memcomp.evaluation import run as evaluation
from memcomp.export import names, read, tensors, write
from memcomp.layers import registry
from memcomp.models import abstract, decoder
from memcomp.runs import workdir

ROOT = pathlib.Path(__file__).parents[2]


def params_of(model):
  return abstract.plain(nnx.split(model)[1])


def assert_same(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_logits_are_equal_to_the_last_bit(run, exported, params, logits):
  """Orbax -> safetensors -> load, and Orbax -> Orbax -> load."""
  before = np.asarray(logits(params))
  assert before.std() > 0.1
  found = read.load(exported)
  assert np.abs(logits(params_of(found.model)) - before).max() == 0
  assert_same(params_of(found.model), params)
  assert found.meta["step"] == 3
  saved = json.loads((run / "checkpoints/3/meta/metadata").read_text())
  assert config_lib.to_dict(found.config) == saved["config"]


@pytest.mark.slow
def test_from_any_mesh_to_any_mesh(run, params, tmp_path):
  """Written on 4 x 2 devices, exported on 2 x 2 x 2, loaded on 2 and on 1."""
  three_axes = sharding.make_mesh(
    config_lib.MeshConfig(replica=2, fsdp=2, tensor=2)
  )
  two = sharding.make_mesh(config_lib.MeshConfig(tensor=2))
  for format in read.FORMATS:
    out = write.export(run, tmp_path / format, format=format, mesh=three_axes)
    for mesh in (two, None):
      found = params_of(read.load(out, mesh).model)
      assert_same(found, params)
      devices = found["embedding"].sharding.mesh.size
      assert devices == (2 if mesh else 1)


@pytest.mark.parametrize(
  "name",
  rotation.cases(
    registry.MIXERS, ["trellis", "lattice", "key_value_means", "tensor_cache"]
  ),
)
def test_every_mixer_has_flat_names(name):
  """A hybrid whose layers lie in three stacks; and back again."""
  mixer = registry.config_of(name)(heads=1, key_dim=64, value_dim=64)
  if hasattr(mixer, "rotary_dim"):
    mixer.rotary_dim = 0
  config = config_lib.Config(name="hybrid")
  config.model = decoder.DecoderConfig(
    vocab_size=16,
    d_model=16,
    num_layers=5,
    mlp_dim=8,
    mixers={
      "memory": mixer,
      "other": registry.config_of("linear_attention")(heads=2, key_dim=8),
    },
    pattern="2*(memory+other),memory",
    tied_embeddings=False,
  )
  params = runs.random_params(config)
  flat = names.flatten(config.model, params)
  assert sum(x.size for x in flat.values()) == sum(
    x.size for x in jax.tree.leaves(params)
  )
  assert_same(names.unflatten(config.model, flat.__getitem__), params)
  # Stacks: layers 0 and 2, layers 1 and 3, layer 4.
  for depth, (stack, place) in enumerate(
    [("0", 0), ("1", 0), ("0", 1), ("1", 1), ("2", 0)]
  ):
    kernel = params["layers"][stack]["mlp"]["up"]["kernel"][place]
    np.testing.assert_array_equal(
      flat[f"layers.{depth}.mlp.up.weight"], kernel.T
    )


def test_files_are_as_others_write_them(exported, params):
  files = sorted(path.name for path in exported.glob("*.safetensors"))
  assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
  assert len(files) > 3
  index = json.loads((exported / tensors.INDEX).read_text())
  assert set(index["weight_map"].values()) == set(files)
  found = {}
  for file in files:
    arrays = safetensors.load_file(exported / file)
    sizes = [array.nbytes for array in arrays.values()]
    # An array over the limit has a file of its own.
    assert sum(sizes) <= 9000 or len(sizes) == 1
    assert all(index["weight_map"][name] == file for name in arrays)
    found |= arrays
  assert index["metadata"]["total_size"] == sum(
    a.nbytes for a in found.values()
  )
  kernel = params["layers"]["0"]["mixer"]["target"]["kernel"][1]
  assert kernel.shape == (32, 16)
  np.testing.assert_array_equal(found["layers.1.mixer.target.weight"], kernel.T)
  np.testing.assert_array_equal(found["embedding.weight"], params["embedding"])
  assert oct((exported / files[0]).stat().st_mode)[-3:] == "644"


def test_without_a_limit_it_is_one_file(run, tmp_path):
  out = write.export(run, tmp_path / "one")
  names_ = sorted(path.name for path in out.iterdir())
  assert names_ == ["config.json", "model.safetensors", "sha256.json"]


def test_bfloat16_is_half_the_bytes(run, params, tmp_path):
  out = write.export(run, tmp_path / "half", dtype="bfloat16")
  rounded = jax.tree.map(
    lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), params
  )
  assert_same(params_of(read.load(out).model), rounded)
  size = (out / tensors.SINGLE).stat().st_size
  assert size < 1.1 * 2 * sum(x.size for x in jax.tree.leaves(params))


def test_a_changed_byte_is_seen(exported, tmp_path):
  out = shutil.copytree(exported, tmp_path / "copy")
  file = sorted(out.glob("*.safetensors"))[1]
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  with pytest.raises(errors.UserError, match=f"{file.name} has changed"):
    read.load(out)
  file.unlink()
  with pytest.raises(errors.UserError, match=f"{file.name} is missing"):
    read.load(out)


@pytest.mark.parametrize(
  "error", [KeyboardInterrupt, errors.Terminated, OSError(28, "No space")]
)
def test_an_interrupted_export_leaves_nothing(
  run, tmp_path, monkeypatch, error
):
  calls = []
  save = safetensors.save_file

  def save_once(*args, **kwargs):
    calls.append(args)
    if len(calls) == 2:
      raise error
    save(*args, **kwargs)

  monkeypatch.setattr(safetensors, "save_file", save_once)
  expected = errors.UserError if isinstance(error, OSError) else error
  with pytest.raises(expected):
    write.export(run, tmp_path / "out", shard_bytes=9000)
  assert len(calls) == 2
  assert not list(tmp_path.iterdir())


def test_a_killed_export_does_not_stand_in_the_way(run, params, tmp_path):
  partial = tmp_path / ".out.partial"
  partial.mkdir()
  (partial / "model-00007-of-00009.safetensors").write_text("half")
  out = write.export(run, tmp_path / "out")
  assert [path.name for path in tmp_path.iterdir()] == ["out"]
  assert len(list(out.glob("*.safetensors"))) == 1
  with pytest.raises(errors.UserError, match="is there already"):
    write.export(run, tmp_path / "out", dtype="bfloat16")
  assert_same(params_of(read.load(out).model), params)


def test_two_exports_into_one_folder(run, params, tmp_path):
  out = tmp_path / "out"
  with disk.new_folder(out) as first:
    (first / "file").write_text("first")
    with pytest.raises(errors.UserError, match="is being written by"):
      write.export(run, out)
  assert [path.name for path in out.iterdir()] == ["file"]


def test_the_tokenizer_goes_along(tmp_path):
  import tokenizers

  vocab = {chr(97 + i): i for i in range(20)}
  own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
  own.save(str(tmp_path / "letters.json"))
  config = config_lib.Config(name="letters")
  config.data.tokenizer = str(tmp_path / "letters.json")
  config.model = decoder.DecoderConfig(
    vocab_size=20, d_model=8, num_layers=1, mlp_dim=8
  )
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  runs.save(tmp_path / "run", config, 1, tokenizer=tokenizer.fingerprint)
  write.export(tmp_path / "run", tmp_path / "out")
  (tmp_path / "letters.json").unlink()
  moved = (tmp_path / "out").rename(tmp_path / "moved")
  found = read.load(moved)
  assert found.tokenizer.fingerprint == tokenizer.fingerprint
  # From an export it goes on to the next.
  write.export(moved, tmp_path / "again")
  assert read.load(tmp_path / "again").tokenizer.vocab_size == 20


def test_a_model_of_a_task_goes_without_one(tmp_path):
  config = config_lib.Config(name="task")
  config.data.task = recall.RecallConfig(gap=2, episodes=1)
  config.data.tokenizer = "none"
  config.model = decoder.DecoderConfig(
    vocab_size=54, d_model=8, num_layers=1, mlp_dim=8
  )
  none = tokenizer_lib.NoTokenizer()
  runs.save(tmp_path / "run", config, 1, tokenizer=none.fingerprint)
  write.export(tmp_path / "run", tmp_path / "out")
  found = read.load(tmp_path / "out")
  assert found.tokenizer.name == "none"
  assert found.config.data.task == config.data.task


@pytest.mark.slow
def test_evaluation_takes_an_export(run, exported, capsys, tmp_path):
  """The same figures as of the run."""
  said = []
  for folder in (run, exported):
    out = tmp_path / folder.name
    evaluation.run(folder, "perplexity", out=str(out))
    found = json.loads((out / "perplexity.json").read_text())
    said.append((capsys.readouterr().out.split("written:")[0], found))
  assert said[0] == said[1]
  evaluation.run(exported, "sample")
  assert len(capsys.readouterr().out) > len("def ")
  with pytest.raises(errors.UserError, match="is of step 3"):
    evaluation.run(exported, "sample", step=2)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"format": "pickle"}, "safetensors, orbax"),
    ({"dtype": "int8"}, "float32, bfloat16"),
    ({"format": "orbax", "dtype": "bfloat16"}, "of safetensors"),
    ({"shard_bytes": 0}, "1 or more"),
    ({"out": "gs://bucket/model"}, "no renames"),
    ({"checkpoint": "nowhere"}, "no checkpoint"),
  ],
)
def test_mistakes_are_told(run, tmp_path, change, message):
  arguments = {"checkpoint": run, "out": tmp_path / "out"} | change
  with pytest.raises(errors.UserError, match=message):
    write.export(**arguments)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("out", "message"),
  [
    ("file/x", "Not a directory"),
    ("a" * 300, "File name too long"),
    ("/proc/x", "cannot write /proc"),
    ("link", "link is there already"),
  ],
)
def test_places_that_cannot_be(run, tmp_path, monkeypatch, out, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").touch()
  (tmp_path / "link").symlink_to("nowhere")

  def program():
    write.export(run, out)

  error = io.StringIO()
  with contextlib.redirect_stderr(error):
    assert cli.guard(program) == errors.EXIT_BAD_INPUT
  assert message in error.getvalue() and error.getvalue().count("\n") == 1
  assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


@pytest.mark.slow
def test_a_limit_of_file_sizes(run, tmp_path):
  # Raised in Rust, with the system's text in it.
  command = f"ulimit -f 20; exec {sys.executable} -m memcomp.export"
  done = subprocess.run(
    ["bash", "-c", f"{command} --checkpoint={run} --out=~/model"],
    env=os.environ
    | {
      "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
      "HOME": str(tmp_path),
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert f"cannot write {tmp_path}/model: File too large" in done.stderr
  assert done.stderr.count("\n") == 1
  assert not list(tmp_path.iterdir())


def test_the_command(run, params, tmp_path):
  command = [sys.executable, "-m", "memcomp.export", f"--checkpoint={run}"]
  done = subprocess.run(
    [*command, "--out=model", "--shard_bytes=9000"],
    cwd=tmp_path,
    env=os.environ
    | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    capture_output=True,
    text=True,
    check=False,
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert f"written: {tmp_path / 'model'}, " in done.stdout
  assert (tmp_path / "model" / tensors.INDEX).exists()
  assert_same(params_of(read.load(tmp_path / "model").model), params)


def test_a_config_is_rebuilt(exported):
  meta = read.settings(exported)
  config = workdir.config_of(meta["config"], "")
  assert config_lib.to_dict(config) == meta["config"]
