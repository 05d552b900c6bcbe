"""A config has the options of its Spec, as the Spec states them."""

import dataclasses
import types
import typing

import pytest

from memcomp.layers import options, registry
from memcomp_kernels.options import option, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  slots: int = 4
  rule: str = "delta"
  window: int | None = None
  decay: bool = False
  eps: float = 1e-6

  def __post_init__(self):
    if self.slots < 1:
      raise ValueError(f"slots={self.slots} must be at least 1")


@options.config_class
class Config(options.MixerConfig):
  op = types.SimpleNamespace(Spec=Spec)
  left_out = ("decay", "eps")

  forget: float = option(0.5, positive)
  window: int = 0

  def derived(self):
    return {"window": self.window or None, "decay": self.forget < 1}


@options.config_class
class Other(Config):
  rule: str = "outer"
  forget: float = 1.0


def test_fields_are_those_of_the_spec_and_then_its_own():
  names = [field.name for field in dataclasses.fields(Config)]
  assert names == [
    *("heads", "key_dim", "value_dim"),
    *("slots", "rule", "window", "forget"),
  ]
  assert Config() == Config(slots=4, rule="delta", window=0, forget=0.5)
  assert typing.get_type_hints(Config)["slots"] is int
  assert typing.get_type_hints(Config)["window"] is int


def test_the_spec_has_the_options_and_what_follows_from_them():
  assert Config().spec() == Spec(decay=True)
  assert Other(slots=8, window=3).spec() == Spec(
    slots=8, rule="outer", window=3
  )


def test_another_default_keeps_the_checks():
  assert [f.name for f in dataclasses.fields(Other)] == [
    f.name for f in dataclasses.fields(Config)
  ]
  for config in (Config, Other):
    with pytest.raises(ValueError, match=r"^forget=0 must be positive$"):
      config(forget=0).validate()
    with pytest.raises(ValueError, match=r"^slots=0 must be at least 1$"):
      config(slots=0).validate()


def test_numbers_are_finite():
  with pytest.raises(ValueError, match=r"^forget=inf must be finite$"):
    Config(forget=float("inf")).validate()


def test_only_fields_can_be_set():
  config = Other()
  config.slots = 3
  assert config.spec().slots == 3
  with pytest.raises(AttributeError):
    config.eps = 1.0
  with pytest.raises(TypeError, match="eps"):
    Other(eps=1.0)


@pytest.mark.parametrize("name", registry.MIXERS)
def test_options_of_mixers_are_fields_of_specs(name):
  config = registry.config_of(name)
  fields = {field.name for field in dataclasses.fields(config.op.Spec)}
  assert {field.name for field in config.spec_fields()} == fields - {
    *config.left_out
  }
  assert fields >= {*config.left_out}
  for field in config.spec_fields():
    assert hasattr(config(), field.name)
