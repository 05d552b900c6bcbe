"""The rule table and the mesh."""

import jax
import pytest
from jax.sharding import PartitionSpec

from memcomp import config, errors, sharding
from memcomp.layers import trellis
from memcomp.models import decoder
from memcomp.training import state


def test_spec_maps_logical_names():
  assert sharding.spec("batch", "time", "heads", None) == PartitionSpec(
    ("replica", "fsdp"), None, "tensor", None
  )
  assert sharding.spec("embed", "mlp") == PartitionSpec("fsdp", "tensor")


def test_collisions_and_unknown_names_raise():
  with pytest.raises(ValueError, match="collide"):
    sharding.spec("batch", "embed")
  with pytest.raises(ValueError, match="unknown logical axis 'width'"):
    sharding.spec("width")


def test_mesh_takes_the_rest():
  mesh = sharding.make_mesh(config.MeshConfig(replica=-1, tensor=2))
  assert dict(mesh.shape) == {
    "replica": len(jax.devices()) // 2,
    "fsdp": 1,
    "tensor": 2,
    "context": 1,
  }


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"fsdp": 1000}, "asks for 1000 devices"),
    ({"fsdp": 0}, "mesh.fsdp=0"),
    ({"replica": -1, "tensor": 3}, "does not divide"),
    ({"replica": -1, "fsdp": -1}, "both -1"),
  ],
)
def test_a_mesh_that_does_not_fit_says_why(sizes, message):
  with pytest.raises(errors.UserError, match=message):
    sharding.make_mesh(config.MeshConfig(**sizes))


def mesh_of(devices, **sizes):
  return sharding.make_mesh(config.MeshConfig(**sizes), jax.devices()[:devices])


def test_parameters_that_do_not_divide_are_named():
  mixer = trellis.TrellisConfig(heads=3, key_dim=8, value_dim=8, num_slots=4)
  model = decoder.DecoderConfig(
    d_model=24, num_layers=1, mlp_dim=32, mixer=mixer
  )
  variables = state.abstract_model(model).variables
  sharding.check_divides(variables, mesh_of(4, fsdp=4))
  with pytest.raises(
    errors.UserError, match=r"'heads' of 3 .* mesh.tensor = 2; .*divisor of 3"
  ):
    sharding.check_divides(variables, mesh_of(2, tensor=2))
  with pytest.raises(errors.UserError, match=r"'embed' of 24 .*mesh.fsdp = 5"):
    sharding.check_divides(variables, mesh_of(5, fsdp=5))


@pytest.mark.parametrize(
  ("d_model", "replica", "fsdp", "better"),
  [
    (768, 1, 8, None),
    (48, 1, 2, None),  # 24 features a shard
    (48, 1, 4, (2, 2)),
    (64, 2, 4, (4, 2)),
    (20, 1, 4, (4, 1)),
  ],
)
def test_narrow_shards_name_a_better_mesh(d_model, replica, fsdp, better):
  mesh = mesh_of(replica * fsdp, replica=replica, fsdp=fsdp)
  said = sharding.narrow_shards(d_model, mesh)
  if better is None:
    assert said is None
  else:
    assert f"mesh.replica={better[0]}, mesh.fsdp={better[1]}" in said
    assert f"{d_model // fsdp} of {d_model} features" in said
