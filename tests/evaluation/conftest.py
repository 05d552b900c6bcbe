import os
import re
import shutil

import evaluation_cases as cases
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from memcomp import cli
from memcomp.commands import evaluate
from memcomp.data import store as store_lib
from memcomp.evaluation import harness
from memcomp.models import abstract, decoder


@pytest.fixture(scope="session")
def model() -> decoder.Decoder:
  config = cases.tiny_config()
  graphdef = abstract.model_of(config.model).graphdef
  return abstract.merge(graphdef, cases.tiny_params(config))


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


@pytest.fixture
def call(capsys):
  """Calls memcomp eval in this process: flags -> (exit code, stdout, stderr)."""

  def call(*arguments):
    argv = ["memcomp eval", "--compilation_cache=off", *map(str, arguments)]
    with flagsaver.flagsaver():
      flags.FLAGS.unparse_flags()
      with pytest.raises(SystemExit) as stop:
        cli.main(evaluate.program, usage=evaluate.__doc__, argv=argv)
    out, err = capsys.readouterr()
    # A slow machine tells its progress.
    return stop.value.code, out, re.sub(r"(?m)^.* s left\n", "", err)

  return call


@pytest.fixture
def environment(monkeypatch):
  """What `harness.run` sets is of one test."""
  names = "TQDM_DISABLE", "DISABLE_MULTIPROC", "HF_HOME", "XDG_CACHE_HOME"
  for name in (*harness._OFFLINE, *names):
    monkeypatch.setenv(name, os.environ.get(name, ""))
