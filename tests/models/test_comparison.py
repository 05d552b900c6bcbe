"""The small models that are compared: as many parameters, every mixer."""

import dataclasses

import pytest
import rotation

from memcomp.layers import registry
from memcomp.models import comparison


@pytest.mark.parametrize(
  "name",
  rotation.cases(
    comparison.NAMES,
    ["trellis", "lattice", "key_value_means", "tensor_cache"],
  ),
)
def test_parameters_agree(name):
  model = comparison.language_model(name)
  model.validate()
  count = comparison.num_parameters(model)
  assert count == pytest.approx(comparison.PARAMETERS, rel=comparison.TOLERANCE)
  # The channel mixer is what gives way, and it is still one.
  assert model.mlp_dim > model.d_model


@pytest.mark.slow
def test_every_mixer_is_compared():
  models = [comparison.language_model(name) for name in comparison.NAMES]
  assert {registry.name_of(m.mixers["memory"]) for m in models} == set(
    registry.MIXERS
  )


# A feature has 768 parameters: the nearest is below, and above.
@pytest.mark.parametrize("extra", [300, 500])
def test_the_nearest_width_is_taken(extra):
  model = comparison.language_model("trellis")
  aim = comparison.num_parameters(model) + extra
  found = comparison.matched(model, aim)
  errors = [
    abs(
      comparison.num_parameters(
        dataclasses.replace(model, mlp_dim=found.mlp_dim + more)
      )
      - aim
    )
    for more in (-1, 0, 1)
  ]
  assert min(errors) == errors[1]


def test_mistakes_are_named():
  with pytest.raises(ValueError, match="'trelis' is none of: trellis"):
    comparison.language_model("trelis")
  model = comparison.language_model("trellis")
  with pytest.raises(ValueError, match="make it narrower"):
    comparison.matched(model, 10_000)
