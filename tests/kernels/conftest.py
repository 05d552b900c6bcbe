"""The order of the contract's checks, float64, and which Pallas kernels run."""

import jax
import pytest
from jax.experimental import pallas as pl


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def calls(monkeypatch):
  """The names of the Pallas kernels that a test has called for."""
  names, right = set(), pl.pallas_call

  def call(*arguments, name=None, **options):
    names.add(name)
    return right(*arguments, name=name, **options)

  monkeypatch.setattr(pl, "pallas_call", call)
  return names


def pytest_collection_modifyitems(items):
  """Puts checks of one subject side by side: they share what they compile."""
  places = [
    i for i, item in enumerate(items) if item.path.name == "test_contract.py"
  ]

  def subject(item):
    found = item.callspec.params["subject"]
    return found.memory.name, found.implementation, repr(found.spec)

  by_subject = sorted((items[i] for i in places), key=subject)
  for i, item in zip(places, by_subject, strict=True):
    items[i] = item
