"""Whether a config may go on in a run's folder."""

import json

import pytest
import training_cases

from memcomp import config as config_lib
from memcomp import errors
from memcomp.runs import workdir


@pytest.fixture
def config():
  return training_cases.tiny()


def test_a_run_from_before_a_field_existed_goes_on(config):
  saved = json.loads(config_lib.to_json(config))
  del saved["model"]["norm_eps"], saved["evaluation"]
  workdir.check_same(saved, config, "here")
  config.model.norm_eps *= 2
  with pytest.raises(errors.UserError, match=r"model\.norm_eps was"):
    workdir.check_same(saved, config, "here")


def test_fields_that_a_version_has_not_are_named(config):
  saved = json.loads(config_lib.to_json(config))
  saved["model"]["depth"] = 3
  with pytest.raises(errors.UserError, match=r"model\.depth was 3, is"):
    workdir.check_same(saved, config, "here")
  with pytest.raises(errors.UserError, match="its config has depth"):
    workdir.config_of(saved, "here")
