import importlib.util
import pathlib
import shutil

import evaluation_cases as cases
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from memcomp import cli
from memcomp.data import store as store_lib
from memcomp.models import decoder
from memcomp.training import state as state_lib

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model() -> decoder.Decoder:
  config = cases.tiny_config()
  graphdef = state_lib.abstract_model(config.model).graphdef
  return state_lib.merge(graphdef, cases.tiny_params(config))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
  """The workdir of a run with one checkpoint, of step 3."""
  folder = tmp_path_factory.mktemp("trained")
  config = cases.tiny_config(
    source=cases.write_text(folder / "text"), validation_share=0.3
  )
  config.evaluation.lengths = 4
  config.evaluation.rows = 2
  config.evaluation.sample_tokens = 12
  cases.save(folder / "run", config, 3)
  return folder / "run"


@pytest.fixture
def run_folder(trained, tmp_path):
  """A copy of `trained` that a test may write into."""
  return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="session")
def store() -> store_lib.ArrayStore:
  rng = np.random.default_rng(1)
  lengths = np.array([1, 300, 7, 512, 80])
  tokens = rng.integers(97, 123, lengths.sum()).astype(np.uint8)
  return store_lib.ArrayStore("letters", tokens, lengths)


@pytest.fixture(scope="session")
def program():
  """The module eval.py; its flags can be defined once a process."""
  spec = importlib.util.spec_from_file_location(
    "eval_program", ROOT / "eval.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def call(program, capsys):
  """Calls eval.py in this process: flags -> (exit code, stdout, stderr)."""

  def call(*arguments):
    argv = ["eval.py", "--compilation_cache=off", *map(str, arguments)]
    with flagsaver.flagsaver():
      flags.FLAGS.unparse_flags()
      with pytest.raises(SystemExit) as stop:
        cli.main(program.program, usage=program.__doc__, argv=argv)
    return stop.value.code, *capsys.readouterr()

  return call
