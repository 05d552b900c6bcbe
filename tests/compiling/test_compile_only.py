"""A training step compiled for TPUs that are not there."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from memcomp import config as config_lib
from memcomp import errors
from memcomp.compiling import chips, compile_only
from memcomp.models import abstract, presets
from memcomp_kernels import aot

needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def two_layers(rows=16, time=512):
  """Two layers of Trellis 125m on rows without packing."""
  model = presets.language_model("trellis-125m")
  model.num_layers = 2
  model.mixers["memory"].chunk_size = 64
  config = config_lib.Config(name="two-layers", model=model)
  config.data.packing, config.data.sequence_length = "joined", time
  config.training.batch_size, config.training.loss_chunk = rows, 256
  config.mesh.fsdp = config.mesh.tensor = 2
  return config


def test_the_compiler_is_asked_for(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, "libtpu", None)
  monkeypatch.setattr(aot, "available", lambda: False)
  with pytest.raises(errors.UserError, match=r"pip install .*aot"):
    compile_only.run(two_layers(), "v5e:2x2", tmp_path)
  assert not list(tmp_path.iterdir())


def test_largest_arrays_are_of_one_device():
  mesh = Mesh(np.array(jax.devices()[:1]), ("x",))

  def step(x):
    local = jax.shard_map(
      lambda x: jnp.concatenate([x] * 8),
      mesh=mesh,
      in_specs=PartitionSpec("x"),
      out_specs=PartitionSpec("x"),
    )
    return jnp.concatenate([x] * 16).sum() + local(x).sum()

  jaxpr = jax.make_jaxpr(step)(jnp.ones((3, 5)))
  # Spread over four: 16 x 3 rows; in the shard_map as they are: 8 x 3.
  first, second = compile_only.largest_arrays(jaxpr, 4)[:2]
  assert first == (8 * 3 * 5 * 4, "float32[24, 5]")
  assert second == (16 * 3 * 5 * 4 / 4, "float32[48, 5]")


@pytest.mark.aot
@needs_compiler
def test_topologies_that_do_not_exist_are_named():
  with pytest.raises(errors.UserError, match="--topology=v5e:3x3"):
    chips.devices("v5e:3x3")


@pytest.mark.aot
@needs_compiler
def test_a_step_for_four_chips(tmp_path, capsys):
  config = two_layers()
  config.model.num_layers = 1  # kernels take nearly all of the time
  assert compile_only.run(config, "v5e:2x2", tmp_path) == 0
  report = json.loads((tmp_path / "compile_only" / "v5e_2x2.json").read_text())
  # Forward, and again for the gradient; both forms of decay.
  assert report["kernels"] == {"trellis_forward": 4, "trellis_backward": 2}
  kinds = report["collectives"]
  assert not any(row["in_inner_loops"] for row in kinds.values())
  # Golden, of this compiler: the table, for lookups and head, is gathered and
  # reduced once a step.
  executions = {kind: row["executions"] for kind, row in kinds.items()}
  assert executions == {
    "all-gather": 25,
    "all-reduce": 28,
    "reduce-scatter": 3,
  }
  mib = {kind: row["bytes"] / 2**20 for kind, row in kinds.items()}
  assert mib["all-gather"] < 1.05 * 32.0
  assert mib["all-reduce"] < 1.05 * 38.5
  assert mib["reduce-scatter"] < 1.05 * 28.7
  # Every product is counted, and the two recomputed of eight.
  assert 1.0 < report["flops"]["ratio"] < 1.5
  memory = report["memory_per_device"]
  assert memory["total"] < 1.05 * 511 * 2**20
  assert memory["available"] == 16 * 2**30
  shown = capsys.readouterr().out
  assert "trellis_forward" in shown and "all-gather" in shown


@pytest.mark.aot
@needs_compiler
def test_only_gradients_and_counts_cross_slices(tmp_path, capsys):
  config = two_layers(rows=8, time=256)
  model = config.model = presets.language_model("softmax_attention-125m")
  model.num_layers, model.d_model, model.mlp_dim = 1, 512, 256
  model.mixers["memory"].heads = model.mixers["memory"].kv_heads = 2
  model.vocab_size = 512
  config.mesh.replica, config.mesh.fsdp, config.mesh.tensor = 2, 4, 1
  assert compile_only.run(config, "v5e:2x2", tmp_path, slices=2) == 0
  (path,) = (tmp_path / "compile_only").iterdir()
  assert path.name == "2xv5e_2x2.json"
  report = json.loads(path.read_text())
  assert (report["slices"], report["devices"]) == (2, 8)
  ((kind, sent),) = report["between_slices"].items()
  assert kind == "all-reduce" and not sent["in_inner_loops"]
  # Each shard of every parameter's gradient, once, and little else.
  parameters = abstract.model_of(model).variables
  count = sum(x.size for x in jax.tree.leaves(parameters))
  assert 2 * count / 4 < sent["bytes"] < 4 * count / 4 * 1.05
  shown = capsys.readouterr().out
  assert "v5e:2x2 x 2 slices: 8 x TPU" in shown
  assert "sent between slices (DCN)" in shown


@pytest.mark.aot
@needs_compiler
def test_shards_of_time_move_states_alone(tmp_path):
  config = two_layers(rows=2, time=1024)
  model = config.model
  model.d_model, model.mlp_dim, model.vocab_size = 256, 256, 512
  model.mixers["memory"].heads = 4
  config.mesh.fsdp, config.mesh.tensor, config.mesh.context = 1, 1, 4
  assert compile_only.run(config, "v5e:2x2", tmp_path) == 0
  report = json.loads((tmp_path / "compile_only" / "v5e_2x2.json").read_text())
  # Taps of convolutions, and in each of seven turns, of four parts, a state.
  kinds = report["collectives"]
  assert set(kinds) == {"all-reduce", "collective-permute"}
  turns = kinds["collective-permute"]["in_inner_loops"]
  assert turns and turns % 7 == 0
  assert kinds["collective-permute"]["bytes"] < 1.05 * 5.36 * 2**20
  assert report["kernels"]["trellis_backward"] % 7 == 0


@pytest.mark.aot
@needs_compiler
def test_one_that_does_not_fit_says_what_is_large(tmp_path, capsys):
  config = two_layers(rows=4096, time=4096)
  config.training.loss_chunk = 0
  code = compile_only.run(config, "v5e:2x2", tmp_path)
  assert code == errors.EXIT_DOES_NOT_FIT
  shown = capsys.readouterr().err
  assert "a device needs" in shown and "has 15.75GiB" in shown
  assert "4096, 4096, 32000]" in shown
  assert not (tmp_path / "compile_only").exists()


@pytest.mark.aot
@needs_compiler
def test_one_that_compiles_and_does_not_fit(tmp_path, capsys, monkeypatch):
  """The compiler lets some pass; the report is saved all the same."""
  monkeypatch.setattr(chips, "hbm_bytes", lambda device: 2**20)
  config = two_layers(rows=4, time=128)
  config.training.loss_chunk = 0
  code = compile_only.run(config, "v5e:2x2", tmp_path)
  assert code == errors.EXIT_DOES_NOT_FIT
  shown = capsys.readouterr().err
  assert "has 0.00GiB" in shown and "[32000, 768]" in shown
  assert len(list((tmp_path / "compile_only").iterdir())) == 1
