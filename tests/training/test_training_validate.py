import dataclasses
import math

import jax
import pytest
import training_cases

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.layers import registry
from memcomp.training import validate


def _message(path, value):
  config = training_cases.tiny()
  training_cases.set_field(config, path, value)
  with pytest.raises(errors.UserError) as error:
    validate.check(config)
  return str(error.value)


def test_the_tiny_config_is_fine():
  validate.check(training_cases.tiny())


@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("training.steps", 0),
    ("training.batch_size", 0),
    ("training.batch_size", -4),
    ("training.accumulation", 0),
    ("training.z_loss", -1.0),
    ("training.loss_chunk", -1),
    ("training.implementation", "mosaic"),
    ("training.max_nonfinite_steps", 0),
    ("training.log_every", 0),
    ("training.evaluate_every", -1),
    ("training.evaluate_batches", 0),
    ("training.checkpoint_every", 0),
    ("training.keep_checkpoints", 0),
    ("training.profile_steps", 0),
    ("training.profile_start", 8),
    ("optimizer.learning_rate", 0.0),
    ("optimizer.learning_rate", -1e-3),
    ("optimizer.learning_rate", math.nan),
    ("optimizer.learning_rate", math.inf),
    ("optimizer.final_learning_rate", -1.0),
    ("optimizer.final_learning_rate", 1.0),
    ("optimizer.name", "adam"),
    ("optimizer.momentum", 1.0),
    ("optimizer.schedule", "cosin"),
    ("optimizer.warmup_steps", -1),
    ("optimizer.warmup_steps", 8),
    ("optimizer.decay_share", 0.0),
    ("optimizer.decay_share", 1.5),
    ("optimizer.b1", 1.0),
    ("optimizer.b2", -0.1),
    ("optimizer.eps", 0.0),
    ("optimizer.weight_decay", -0.1),
    ("optimizer.clip_norm", -1.0),
    ("mesh.replica", 0),
    ("mesh.fsdp", 0),
    ("mesh.tensor", 0),
    ("mesh.context", 0),
    ("optimizer.base_width", -1),
    ("training.watchdog_seconds", -1.0),
    ("data.sequence_length", 0),
    ("data.packing", "nonsense"),
    ("seed", -1),
    ("evaluation.rows", 0),
    ("evaluation.lengths", 0),
    ("evaluation.sample_tokens", -1),
    ("evaluation.temperature", -1.0),
    ("evaluation.top_p", 0.0),
  ],
)
def test_a_value_out_of_range_is_named(path, value):
  message = _message(path, value)
  assert path in message and "\n" not in message
  assert str(value) in message


@pytest.mark.parametrize(
  ("path", "value", "takes"),
  [
    ("training.steps", "10", "a whole number"),
    ("training.steps", 10.0, "a whole number"),
    ("training.steps", True, "a whole number"),
    ("training.carry_state", 1, "true or false"),
    ("optimizer.learning_rate", "1e-3", "a number"),
    ("data.tokenizer", None, "text"),
    ("name", 3, "text"),
    ("model", None, "DecoderConfig"),
  ],
)
def test_a_value_of_the_wrong_type_is_named(path, value, takes):
  message = _message(path, value)
  assert message.startswith(f"{path} = {value!r}") and takes in message


@pytest.mark.parametrize("name", ["", " ", ".", "a/..", "../a", "/a"])
def test_a_name_is_a_folder_of_its_own_below_runs(name):
  assert f"name = {name!r} is no folder below runs/" in _message("name", name)


def test_a_whole_number_will_do_for_a_number():
  config = training_cases.tiny()
  config.optimizer.weight_decay = 0
  validate.check(config)


def test_fields_of_the_model_are_checked_too():
  assert "num_layers" in _message("model.num_layers", 0)
  assert "phi" in _message("model.mixers.memory.phi", "cosine")


def test_fields_that_must_agree():
  assert "accumulation = 3" in _message("training.accumulation", 3)
  assert "packing to stream" in _message("training.carry_state", True)
  assert "below 8" in _message("optimizer.warmup_steps", 20)
  config = training_cases.tiny()
  config.optimizer.name, config.optimizer.base_width = "muon", 64
  with pytest.raises(errors.UserError, match="set base_width to 0, or"):
    validate.check(config)


def test_attention_that_would_forget_within_a_row():
  """A state that rows pass on has a room of its own, which a row must fit."""
  config = training_cases.tiny()
  mixer = registry.config_of("softmax_attention")
  config.training.state_passing = 0.5
  rows = config.data.sequence_length
  config.model = dataclasses.replace(
    config.model, mixers={"memory": mixer(heads=1, max_length=rows)}
  )
  validate.check(config)
  config.model = dataclasses.replace(
    config.model, mixers={"memory": mixer(heads=1, max_length=rows - 1)}
  )
  with pytest.raises(errors.UserError, match=f"set max_length to {rows} or"):
    validate.check(config)
  config.training.state_passing = 0
  validate.check(config)


def test_rows_that_do_not_divide_over_the_mesh():
  config = training_cases.tiny(batch_size=6, accumulation=1)
  config.mesh = config_lib.MeshConfig(replica=2, fsdp=2)
  mesh = sharding.make_mesh(config.mesh)
  with pytest.raises(
    errors.UserError, match=r"6 rows .* 4 shards.*multiple of 4"
  ):
    validate.check_mesh(config, mesh)
  config.training.batch_size = 8
  validate.check_mesh(config, mesh)
  config.training.accumulation = 4
  with pytest.raises(
    errors.UserError, match=r"2 rows .* 4 shards.*multiple of 16"
  ):
    validate.check_mesh(config, mesh)


def test_more_devices_than_there_are():
  config = config_lib.MeshConfig(fsdp=2 * len(jax.devices()))
  with pytest.raises(errors.UserError, match="devices"):
    sharding.make_mesh(config)


def test_a_vocabulary_larger_than_the_model():
  config = training_cases.tiny()
  validate.check_vocabulary(config, 256)
  with pytest.raises(
    errors.UserError, match=r"300 ids.*model.vocab_size = 256"
  ):
    validate.check_vocabulary(config, 300)
