import jax
import numpy as np
import pytest
import runs
from export_cases import tiny_config

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.export import write
from memcomp.models import abstract


@pytest.fixture(scope="session")
def mesh():
  """Eight devices, which the run was trained on."""
  return sharding.make_mesh(config_lib.MeshConfig(fsdp=4, tensor=2))


@pytest.fixture(scope="session")
def run(tmp_path_factory, mesh):
  """The folder of a run, whose checkpoint of step 3 lies on eight devices."""
  folder = tmp_path_factory.mktemp("run")
  (folder / "text").mkdir()
  (folder / "text" / "a.txt").write_text("to and fro, " * 40)
  config = tiny_config(source=str(folder / "text"), validation_share=0.0)
  config.data.validation = config.data.source
  params = runs.random_params(config, mesh)
  runs.save(folder / "run", config, 3, params=params)
  return folder / "run"


@pytest.fixture(scope="session")
def exported(run, tmp_path_factory):
  """The run as safetensors of at most 9 kB."""
  out = tmp_path_factory.mktemp("exported") / "model"
  return write.export(run, out, shard_bytes=9000)


@pytest.fixture(scope="session")
def params(run):
  """The parameters of that run, on the host."""
  return jax.tree.map(np.asarray, runs.random_params(tiny_config()))


@pytest.fixture(scope="session")
def logits():
  """(config, parameters) -> logits of some tokens, by one compiled program."""
  tokens = np.random.default_rng(0).integers(0, 256, (2, 21))

  @jax.jit
  def compute(params):
    graphdef = abstract.model_of(tiny_config().model).graphdef
    model = abstract.merge(graphdef, params)
    return model(tokens)

  compute.tokens = tokens
  return compute
