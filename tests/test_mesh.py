"""The rule table and the mesh."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from memcomp import config, errors, sharding
from memcomp.compiling import program
from memcomp.layers import softmax_attention, trellis
from memcomp.models import abstract, decoder
from memcomp.training import validate

RULES = sharding.RULES


def test_spec_maps_logical_names():
  assert RULES.spec("batch", "time", "heads", None) == PartitionSpec(
    ("replica", "fsdp"), "context", "tensor", None
  )
  assert RULES.spec("embed", "mlp") == PartitionSpec("fsdp", "tensor")


def test_collisions_and_unknown_names_raise():
  with pytest.raises(ValueError, match="collide"):
    RULES.spec("batch", "embed")
  with pytest.raises(ValueError, match="unknown logical axis 'width'"):
    RULES.spec("width")


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
    ({"replica": -1, "fsdp": -1}, "mesh.fsdp=-1 is not a size"),
  ],
)
def test_a_mesh_that_does_not_fit_says_why(sizes, message):
  with pytest.raises(errors.UserError, match=message):
    sharding.make_mesh(config.MeshConfig(**sizes))


class Chip:
  """As much of a TPU chip as a mesh looks at."""

  platform, device_kind = "tpu", "TPU v5 lite"

  def __init__(self, slice_index, place):
    self.id, self.slice_index = 4 * slice_index + place, slice_index
    self.process_index, self.core_on_chip = slice_index, 0
    self.coords = (place % 2, place // 2, 0)


def chips(slices):
  """Slices of 2 x 2 chips, the last one first."""
  found = [
    Chip(number, place) for number in range(slices) for place in range(4)
  ]
  return found[::-1]


@pytest.mark.parametrize(
  ("slices", "sizes", "shape"),
  [
    (1, {"fsdp": 4}, (1, 4, 1, 1)),
    (2, {"replica": 2, "fsdp": 4}, (2, 4, 1, 1)),
    (2, {"replica": -1, "tensor": 2}, (4, 1, 2, 1)),
    (3, {"replica": 3, "fsdp": 2, "context": 2}, (3, 2, 1, 2)),
  ],
)
def test_replica_alone_goes_over_slices(slices, sizes, shape):
  mesh = sharding.make_mesh(config.MeshConfig(**sizes), chips(slices))
  assert mesh.devices.shape == shape
  assert len(set(mesh.devices.flat)) == 4 * slices
  for replica, devices in enumerate(mesh.devices):
    held = {device.slice_index for device in devices.flat}
    assert held == {replica * slices // shape[0]}


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"fsdp": 8}, "replica=1 is not a multiple of the 2 slices.*4 devices"),
    ({"replica": 2, "fsdp": 2}, "takes 4 of the 8 devices of 2 slices"),
  ],
)
def test_a_mesh_that_does_not_fit_slices_says_why(sizes, message):
  with pytest.raises(errors.UserError, match=message):
    sharding.make_mesh(config.MeshConfig(**sizes), chips(2))


def mesh_of(devices, **sizes):
  return sharding.make_mesh(config.MeshConfig(**sizes), jax.devices()[:devices])


def test_parameters_that_do_not_divide_are_named():
  mixer = trellis.TrellisConfig(heads=3, key_dim=8, value_dim=8, num_slots=4)
  model = decoder.DecoderConfig(
    d_model=24, num_layers=1, mlp_dim=32, mixers={"memory": mixer}
  )
  found = abstract.model_of(model)
  abstract.params_of(found, mesh_of(4, fsdp=4))
  with pytest.raises(
    errors.UserError, match=r"'heads' of 3 .* mesh.tensor = 2; .*divisor of 3"
  ):
    abstract.params_of(found, mesh_of(2, tensor=2))
  with pytest.raises(errors.UserError, match=r"'embed' of 24 .*mesh.fsdp = 5"):
    abstract.params_of(found, mesh_of(5, fsdp=5))


def test_heads_that_do_not_divide_are_named():
  """Their channels would."""
  mixer = softmax_attention.SoftmaxAttentionConfig(heads=4, kv_heads=2)
  model = decoder.DecoderConfig(
    d_model=32, num_layers=1, mlp_dim=32, mixers={"memory": mixer}
  )
  for check in (
    functools.partial(abstract.params_of, abstract.model_of(model)),
    functools.partial(
      validate.check_mesh, config.Config(name="x", model=model)
    ),
  ):
    check(mesh_of(2, tensor=2))
    with pytest.raises(
      errors.UserError, match=r"'kv_heads' of 2 .* mesh.tensor = 4; .*sor of 2$"
    ):
      check(mesh_of(4, tensor=4))


@pytest.mark.parametrize(
  ("d_model", "replica", "fsdp", "better"),
  [
    (768, 1, 8, None),
    (96, 1, 2, None),  # 48 features per shard
    (96, 1, 4, (2, 2)),
    (128, 2, 4, (4, 2)),
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


def table_hidden_and_tokens():
  table, hidden, tokens = jax.random.split(jax.random.key(0), 3)
  table = jax.random.normal(table, (16, 8))
  hidden = jax.random.normal(hidden, (8, 6, 8))
  return table, hidden, jax.random.randint(tokens, (8, 6), 0, 16)


def use_twice(table, hidden, tokens):
  """A lookup and a head, as in a model whose embeddings are tied."""
  x = sharding.per_shard(lambda t, i: t[i], table, tokens, RULES)
  y = sharding.per_shard(lambda t, h: h @ t.T, table, hidden, RULES)
  return (x**2).sum() + jax.numpy.tanh(y).sum()


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (1, 2)])
def test_gradients_of_a_gathered_table_cross_the_mesh_once(tensor, context):
  table, hidden, tokens = table_hidden_and_tokens()
  expected = jax.grad(use_twice)(table[None], hidden, tokens)[0]
  fsdp = 4 // tensor // context
  mesh = sharding.make_mesh(
    config.MeshConfig(replica=2, fsdp=fsdp, tensor=tensor, context=context)
  )
  rows = sharding.batch_sharding(mesh)
  laid = NamedSharding(mesh, RULES.spec("vocab", "embed"))

  @functools.partial(jax.jit, out_shardings=laid)
  def gradient(table, hidden, tokens):
    def loss(table):
      return use_twice(
        sharding.gathered(table, "float32", RULES), hidden, tokens
      )

    return jax.grad(loss)(table)

  with jax.set_mesh(mesh):
    arguments = (
      jax.device_put(table, laid),
      *jax.device_put((hidden, tokens), rows),
    )
    compiled = gradient.lower(*arguments).compile()
    found = compiled(*arguments)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  # Over its shards, then over copies.
  crossings = re.findall(r" ([a-z-]+)\(.*shard_map/", compiled.as_text())
  assert sorted(c for c in crossings if c in program.COLLECTIVES) == [
    "all-gather",
    "all-reduce",
    "reduce-scatter",
  ]
  # A sharded vocabulary sums lookups, too.
  others = compiled.as_text().count(" all-reduce(") - 1
  assert others == (tensor > 1)


def test_rows_that_do_not_divide_over_time_have_a_table_too():
  table, hidden, tokens = table_hidden_and_tokens()
  expected = use_twice(table[None], hidden[:, :5], tokens[:, :5])
  mesh = sharding.make_mesh(config.MeshConfig(fsdp=4, context=2))

  @jax.jit
  def loss(table):
    tables = sharding.gathered(table, "float32", RULES)
    return use_twice(tables, hidden[:, :5], tokens[:, :5])

  with jax.set_mesh(mesh):
    np.testing.assert_allclose(loss(table), expected, rtol=1e-5)


def test_a_gathered_table_has_values_of_the_dtype():
  table, *_ = table_hidden_and_tokens()
  rounded = table.astype("bfloat16").astype("float32")
  mesh = sharding.make_mesh(config.MeshConfig(replica=2, fsdp=4))
  with jax.set_mesh(mesh):
    found = sharding.gathered(table, "bfloat16", RULES)
  assert found.shape == (8, 16, 8)
  for one in (*found, sharding.gathered(table, "bfloat16", RULES)[0]):
    np.testing.assert_array_equal(one, rounded)


@pytest.mark.parametrize(
  ("process", "context", "expected"),
  [(0, 1, (0, 24)), (1, 2, (0, 24)), (0, 8, (0, 12)), (1, 8, (12, 24))],
)
def test_a_process_gives_the_time_of_its_chips(
  monkeypatch, process, context, expected
):
  # Two processes of four chips each; shards of time are neighbours.
  grid = np.array(chips(2)[::-1], object).reshape(1, 8 // context, 1, context)
  mesh = jax.sharding.Mesh(grid, sharding.AXES)
  monkeypatch.setattr(jax, "process_index", lambda: process)
  assert sharding.time_of_process(mesh, 24) == slice(*expected)


def test_time_in_pieces_is_refused(monkeypatch):
  grid = np.array(chips(2), object).reshape(2, 4).T.reshape(1, 1, 1, 8)
  mesh = jax.sharding.Mesh(grid, sharding.AXES)
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  with pytest.raises(
    errors.UserError, match=r"shards \[1, 3, 5, 7\] of mesh.con"
  ):
    sharding.time_of_process(mesh, 24)
