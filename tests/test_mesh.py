"""The rule table and the mesh."""

import jax
import pytest
from jax.sharding import PartitionSpec

from memcomp import config, errors, sharding


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
