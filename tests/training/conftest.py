import leaky
import pytest
import training_cases

from memcomp.models import decoder


@pytest.fixture
def text(tmp_path):
  return training_cases.write_text(tmp_path / "text")


@pytest.fixture
def leaky_model(monkeypatch):
  """A decoder that compiles in a second, where the memory is beside the point."""
  monkeypatch.setattr(decoder, "Decoder", leaky.Decoder)
