import inference_cases as cases
import pytest

from memcomp.models import decoder


@pytest.fixture(scope="session")
def config() -> decoder.DecoderConfig:
  return cases.small_config()


@pytest.fixture(scope="session")
def model(config) -> decoder.Decoder:
  return cases.build(config)
