"""The validation loss: of the same text whatever the batch, or of nothing."""

import json
import shutil

import jax
import numpy as np
import pytest
import rotation
import training_cases

from memcomp import errors, integrity, sharding
from memcomp.data import sources
from memcomp.training import run, state, validation

pytestmark = pytest.mark.usefixtures("leaky_model")


def write_lines(path, lengths):
  """Documents of so many bytes."""
  lines = [json.dumps({"text": ("abcdefghij" * n)[:n]}) for n in lengths]
  path.write_text("\n".join(lines) + "\n")
  return str(path)


def losses(config, cases):
  """The loss at each (batch_size, accumulation), of the same parameters."""
  mesh = sharding.make_mesh(config.mesh)
  store = sources.open_split(config.data, "validation")
  found = []
  with jax.set_mesh(mesh):
    params = state.initial_state(config, mesh).params
    for rows, parts in cases:
      config.training.batch_size = rows
      config.training.accumulation = parts
      found.append(validation.make(config, store, mesh)(params))
  return found


@pytest.mark.parametrize(
  "packing", rotation.cases(["joined", "first_fit"], ["first_fit"])
)
def test_all_of_the_text_is_scored_whatever_the_batch(text, packing):
  """The last batch is filled up, and what fills it does not count."""
  config = training_cases.tiny(text, evaluate_batches=10**6)
  config.data.packing = packing
  config.data.validation = f"{text}/3*.txt"
  first, *others = losses(config, [(1, 1), (7, 1), (8, 4)])
  for found in others:
    for name, value in found.items():
      np.testing.assert_allclose(value, first[name], rtol=1e-6)


def test_micro_batches_do_not_change_what_is_scored(text):
  config = training_cases.tiny(text, evaluate_batches=2)
  whole, parts = losses(config, [(8, 1), (8, 4)])
  np.testing.assert_allclose(
    parts["validation_loss"], whole["validation_loss"], rtol=1e-6
  )


def test_documents_of_one_token_are_refused(text, tmp_path):
  """For training and for validation, before the run's folder is made."""
  config = training_cases.tiny(text, evaluate_every=2)
  config.data.packing = "concat"
  ones = write_lines(tmp_path / "ones.jsonl", [1] * 100)
  config.data.validation = ones
  with pytest.raises(errors.UserError, match=r"ones\.jsonl: nothing to score"):
    run.run(config, tmp_path / "run")
  config.data.source, config.data.validation = ones, text
  with pytest.raises(errors.UserError, match=r"ones\.jsonl: nothing to score"):
    run.run(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_batches_of_which_nothing_is_scored(text, tmp_path, capsys):
  """Longer documents come behind those that the validation reads."""
  config = training_cases.tiny(text, evaluate_every=2, steps=4)
  config.training.evaluate_batches = 1
  config.data.packing = "concat"
  config.data.validation = write_lines(
    tmp_path / "late.jsonl", [1] * 100 + [50]
  )
  assert run.run(config, tmp_path / "run") == 0
  *_, last = training_cases.curve(tmp_path / "run")
  assert last["validation_loss"] is None
  assert last["validation_bits_per_byte"] is None
  assert last["loss"] > 0
  assert "validation of nothing" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_tells_of_another_validation_text(tmp_path, text, capsys):
  config = training_cases.tiny(text, steps=4, evaluate_every=2)
  config.training.checkpoint_every = 2
  config.training.keep_checkpoints = 9
  config.data.validation = write_lines(tmp_path / "held.jsonl", [40, 50])
  folder = tmp_path / "run"

  def resume():
    shutil.rmtree(folder / "checkpoints/4")
    assert run.run(config, folder) == 0
    return "validation text has changed" in capsys.readouterr().out

  assert run.run(config, folder) == 0
  assert not resume()
  write_lines(tmp_path / "held.jsonl", [40, 60])
  assert resume()
  # Checkpoints of before do not know their validation text.
  path = folder / "checkpoints/2"
  meta = json.loads((path / "meta/metadata").read_text())
  assert meta.pop("validation")
  (path / "meta/metadata").write_text(json.dumps(meta))
  integrity.write(path)
  assert not resume()


@pytest.mark.slow
def test_validation_is_the_mean_over_its_tokens(tmp_path, text):
  config = training_cases.tiny(text)
  config.data.packing = "first_fit"
  config.training.evaluate_every = 8
  config.training.evaluate_batches = 100
  run.run(config, tmp_path / "a")
  once = training_cases.curve(tmp_path / "a")[-1]
  config.training.batch_size = 4
  config.training.accumulation = 4
  run.run(config, tmp_path / "b")
  parts = training_cases.curve(tmp_path / "b")[-1]
  np.testing.assert_allclose(
    once["validation_loss"], parts["validation_loss"], rtol=1e-4
  )
