"""The reader that needs numpy alone computes what the model computes."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import runs
import safetensors.numpy
from export_cases import tiny_config

from memcomp import config as config_lib
from memcomp.export import huggingface, names, numpy_forward, write
from memcomp.layers import softmax_attention, trellis
from memcomp.models import abstract, decoder

FILE = pathlib.Path(numpy_forward.__file__)
DATA = pathlib.Path(__file__).parent / "data"


def assert_close(found, expected):
  """To float32's rounding: the reader goes in float64."""
  error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
  assert error < 1e-5, error


@pytest.mark.parametrize("limit", [9000, 10**9])
def test_of_files(run, logits, params, tmp_path, limit, capsys):
  """Reading one file, and several."""
  out = write.export(run, tmp_path / "out", shard_bytes=limit)
  numpy_forward.main(out, "a")
  assert len(capsys.readouterr().out.splitlines()) == 5
  config, arrays = numpy_forward.read(out)
  for row, expected in zip(logits.tokens, logits(params), strict=True):
    assert_close(numpy_forward.forward(config, arrays, row), expected)


@pytest.mark.parametrize("head_norm", [False, True])
def test_options_of_trellis(head_norm):
  config = tiny_config()
  config.model = decoder.DecoderConfig(
    d_model=16,
    num_layers=1,
    mlp_dim=16,
    tied_embeddings=False,
    norm_eps=0.1,
    mixers={
      "memory": trellis.TrellisConfig(
        heads=2,
        key_dim=4,
        value_dim=6,
        num_slots=5,
        gradient_at="token",
        separate_gates=True,
        convolution_width=0,
        normalize="qk",
        phi_eps=0.5,
        write_rate_scale=2.0,
        head_norm=head_norm,
      )
    },
  )
  params = runs.random_params(config)
  model = abstract.merge(abstract.model_of(config.model).graphdef, params)
  tokens = np.random.default_rng(1).integers(0, 256, (1, 12))
  expected = jax.jit(model.__call__)(tokens)[0]
  found = numpy_forward.forward(
    config_lib.to_dict(config.model),
    names.flatten(config.model, params),
    tokens[0],
  )
  assert_close(found, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_of_softmax_attention(name):
  """Against the logits of another library altogether."""
  config, params = huggingface.load_params(DATA / name)
  tokens, expected = (
    np.load(DATA / name / f"{kind}.npy") for kind in ("tokens", "logits")
  )
  found = numpy_forward.forward(
    config_lib.to_dict(config), names.flatten(config, params), tokens[0]
  )
  assert_close(found, expected[0])


def test_rotation_the_other_way():
  mixer = softmax_attention.SoftmaxAttentionConfig(
    heads=2, kv_heads=1, rotary_reversed=True
  )
  config = tiny_config()
  config.model = decoder.DecoderConfig(
    d_model=16, num_layers=1, mlp_dim=16, mixers={"memory": mixer}
  )
  params = runs.random_params(config)
  model = abstract.merge(abstract.model_of(config.model).graphdef, params)
  tokens = np.random.default_rng(1).integers(0, 256, (1, 12))
  expected = jax.jit(model.__call__)(tokens)[0]
  arrays = names.flatten(config.model, params)
  saved = config_lib.to_dict(config.model)
  assert_close(numpy_forward.forward(saved, arrays, tokens[0]), expected)
  # Exports from before the option rotate as without it.
  fields = saved["mixers"]["memory"]
  fields["rotary_reversed"] = False
  usual = numpy_forward.forward(saved, arrays, tokens[0])
  del fields["rotary_reversed"]
  before = numpy_forward.forward(saved, arrays, tokens[0])
  np.testing.assert_array_equal(before, usual)
  assert np.abs(before - expected).max() > 1e-3


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "usage: python numpy_forward.py FOLDER TEXT"),
    (["{out}", "a", "b"], "usage: python numpy_forward.py FOLDER TEXT"),
    (["{out}", ""], "the text is empty; give at least one byte"),
    (["{out}", "def"], "{out} has the tokenizer 'tokenizer.json', not bytes"),
    (["{out}/no", "def"], "{out}/no has no config.json; export a model there"),
    (["{out}/orbax", "a"], "{out}/orbax has no model*.safetensors; export"),
  ],
)
def test_mistakes_at_the_command_are_told(tmp_path, arguments, said):
  (tmp_path / "orbax").mkdir()
  (tmp_path / "orbax/config.json").touch()
  (tmp_path / "model.safetensors").touch()
  saved = {"data": {"tokenizer": "tokenizer.json"}, "model": {}}
  (tmp_path / "config.json").write_text(json.dumps({"config": saved}))
  given = [argument.format(out=tmp_path) for argument in arguments]
  done = subprocess.run(
    [sys.executable, str(FILE), *given],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 1
  (line,) = done.stderr.splitlines()
  assert line.startswith(said.format(out=tmp_path)), line


def test_ids_that_are_no_bytes_and_mixers_that_no_layer_has(tmp_path, capsys):
  config = tiny_config()
  memory = trellis.TrellisConfig(heads=1, key_dim=4, value_dim=4, num_slots=2)
  window = softmax_attention.SoftmaxAttentionConfig(heads=1)
  config.model = decoder.DecoderConfig(
    vocab_size=5000,
    d_model=16,
    num_layers=1,
    mlp_dim=16,
    mixers={"long_memory": memory, "memory": window},
    pattern="long_memory",
  )
  arrays = names.flatten(config.model, runs.random_params(config))
  safetensors.numpy.save_file(
    jax.tree.map(np.asarray, arrays), tmp_path / "model.safetensors"
  )
  saved = {"config": config_lib.to_dict(config)}
  (tmp_path / "config.json").write_text(json.dumps(saved))
  numpy_forward.main(tmp_path, "hello")
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 5
  assert all(0 < float(line.split()[-1]) < 1 for line in lines)


def test_what_it_has_not_is_told():
  config = config_lib.to_dict(tiny_config().model)
  with pytest.raises(ValueError, match="norm='layer': this reader has only"):
    numpy_forward.forward(config | {"norm": "layer"}, {}, [1])
  config["mixers"] = {"memory": {"name": "lattice"}}
  with pytest.raises(
    ValueError, match=r"one mixer, of \['trellis', 'softmax_at"
  ):
    numpy_forward.forward(config, {}, [1])


def test_an_option_of_later_versions_is_at_its_default(run, tmp_path):
  write.export(run, tmp_path / "out")
  config, arrays = numpy_forward.read(tmp_path / "out")
  expected = numpy_forward.forward(config, arrays, [1, 2])
  (mixer,) = config["mixers"].values()
  del config["embedding_norm"], mixer["rate_bound"]
  np.testing.assert_array_equal(
    numpy_forward.forward(config, arrays, [1, 2]), expected
  )


def test_it_needs_numpy_alone(run, tmp_path):
  out = write.export(run, tmp_path / "out", dtype="bfloat16")
  program = f"""
import sys, runpy
sys.argv = ["numpy_forward.py", {str(out)!r}, "to and"]
runpy.run_path({str(FILE)!r}, run_name="__main__")
print(sorted(m for m in sys.modules if m.split(".")[0] in
             ("jax", "flax", "memcomp", "safetensors", "ml_dtypes")))
"""
  done = subprocess.run(
    [sys.executable, "-I", "-c", program],
    env={"PATH": os.environ["PATH"]},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  *shown, modules = done.stdout.splitlines()
  assert json.loads(modules) == []
  assert len(shown) == 5
  assert len(FILE.read_text().splitlines()) < 300
