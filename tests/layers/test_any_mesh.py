"""Every mixer under meshes that are not ours, against one device.

Losses, gradients, outputs and states agree to 1e-5 of the largest value.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memcomp import sharding
from memcomp.layers import registry
from memcomp.models import decoder

WIDTH, ROWS, TIME = 32, 4, 16
SIZES = {"heads": 4, "key_dim": 8, "value_dim": 8}
SMALL = {
  "bounded_memory": {"num_slots": 4},
  "infini_attention": {"segment_size": 8},
  "key_value_means": {"chunk_size": 4, "budget_rows": 4},
  "lattice": {"num_slots": 4},
  "ovq": {"chunk_size": 4, "max_rows": 8},
  "slot_attention": {"num_slots": 4},
  "softmax_attention": {"max_length": 32},
  "tensor_cache": {"window_size": 4, "chunk_size": 4},
  "test_time_training": {"chunk_size": 4},
  "trellis": {"num_slots": 4, "chunk_size": 4},
}
# Of NumPy: drawing and sorting by jax would compile while tests are collected.
_RNG = np.random.default_rng(1)
X = _RNG.standard_normal((ROWS, TIME, WIDTH)).astype(np.float32)
IDS = np.sort(_RNG.integers(0, 4, (ROWS, TIME)).astype(np.int32))[:, ::-1]


def new(name, rules=sharding.NONE):
  return registry.MIXERS[name](
    WIDTH,
    **SIZES,
    **SMALL.get(name, {}),
    std=0.2,
    rngs=nnx.Rngs(0),
    rules=rules,
  )


@functools.cache
def parameters(name):
  return nnx.split(new(name))[1]


def make(name, rules=sharding.NONE):
  """Layers of a name have the same parameters."""
  abstract = nnx.eval_shape(lambda: new(name, rules))
  own = jax.tree.map(lambda x: x, parameters(name))  # layers change theirs
  return nnx.merge(nnx.split(abstract)[0], own)


def run(layer, x, state, ids, gradient):
  """A packed call: y and state, and gradients of all parameters if wanted."""

  def loss(layer):
    y, after = layer(x, state=state, segment_ids=ids)
    return jnp.mean(jnp.sin(y)), (y, after)

  if not gradient:
    return loss(layer)
  return nnx.value_and_grad(loss, has_aux=True)(layer)


def close(found, expected):
  found, expected = jax.device_get((found, expected))
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    # A gradient of terms that cancel is rounded as they are: Mamba-2's step
    # sizes are 7e-10 from float64 on one device, 1e-5 of their 8e-5.
    scale = max(np.abs(b).max(initial=0), 2e-4)
    assert np.abs(a - b).max(initial=0) <= 1e-5 * scale


def mesh_of(kind):
  return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def check(name, kind, has_rules, in_use, *, gradient=True, **axes):
  """A call on a mesh, arrays laid by `axes`, against one device."""
  compiled = nnx.jit(run, static_argnums=4)
  layer = make(name)
  expected = compiled(layer, X, layer.init_state(ROWS), IDS, gradient)
  mesh = mesh_of(kind)
  told = sharding.rules(mesh, **axes)
  layer = make(name, told if has_rules else sharding.NONE)
  told.place(layer)
  tokens = NamedSharding(mesh, told.spec("batch", "time"))
  x, ids = jax.device_put((X, IDS), tokens)
  state = layer.init_state(ROWS)
  with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
    found = compiled(layer, x, state, ids, gradient)
  close(found, expected)


BOTH = {"batch": "data", "heads": "model", "embed": "data"}


@rotation.both_parts
@pytest.mark.parametrize(
  "name", rotation.cases(registry.MIXERS, ["linear_attention"])
)
def test_rules_without_a_mesh_in_use(name, gradient):
  check(name, AxisType.Auto, True, False, gradient=gradient, **BOTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.MIXERS)
def test_explicit_types_are_the_rules(name):
  check(name, AxisType.Explicit, False, True, **BOTH)


ALL_WAYS = [
  (kind, has_rules, in_use, axes)
  for kind in (AxisType.Auto, AxisType.Explicit)
  for has_rules in (False, True)
  for in_use in (False, True)
  for axes in (
    {},
    {"batch": "data"},
    BOTH,
    {"batch": "data", "time": "model"},
  )
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trellis", "gated_delta_net"])
@pytest.mark.parametrize(("kind", "has_rules", "in_use", "axes"), ALL_WAYS)
def test_every_way(name, kind, has_rules, in_use, axes):
  check(name, kind, has_rules, in_use, **axes)


# The trainer's mesh and the kernels' own tests share time out in every run.
@pytest.mark.slow
def test_time_on_shards():
  check(
    "gated_delta_net", AxisType.Auto, True, True, batch="data", time="model"
  )


@pytest.mark.parametrize(
  "name", rotation.cases(registry.MIXERS, ["gated_delta_net"])
)
def test_one_token_where_time_is_sharded(name):
  """A step, and a call, with the state that a sharded call hands on."""

  @nnx.jit
  def run(layer, x, state):
    _, state = layer(x, state)
    y, state = layer.step(x[:, 0], state)
    return y, *layer(x[:, 1:2], state)

  expected = run(make(name), X, make(name).init_state(ROWS))
  rules = sharding.rules(mesh_of(AxisType.Auto), batch="data", time="model")
  layer = make(name, rules)
  close(run(layer, X, layer.init_state(ROWS)), expected)


OF_HEADS = {"heads": "model", "mlp": "model"}


@pytest.mark.parametrize(
  ("kind", "axes"),
  rotation.cases(
    [
      (AxisType.Auto, OF_HEADS),
      (AxisType.Explicit, OF_HEADS),
      (AxisType.Auto, {"time": "model"}),
    ],
    [(AxisType.Explicit, OF_HEADS)],
  ),
)
def test_a_model(kind, axes):
  """Logits, a state that is handed on, and steps; on Explicit axes by types."""
  config = decoder.DecoderConfig(
    vocab_size=16,
    d_model=WIDTH,
    num_layers=2,
    mlp_dim=32,
    mixers={"memory": registry.config_of("gated_delta_net")(**SIZES)},
  )
  tokens = jax.random.randint(jax.random.key(3), (ROWS, TIME), 0, 16)

  @nnx.jit
  def run(model, tokens, state):
    logits, state = model(tokens, state=state, segment_ids=tokens % 2 + 1)
    last, state = model.step(tokens[:, 0], state)
    return model(tokens), logits, last, state

  model = decoder.Decoder(config, rngs=nnx.Rngs(0))
  expected = run(model, tokens, model.init_state(ROWS))
  mesh = mesh_of(kind)
  told = sharding.rules(mesh, batch="data", **axes)
  if kind == AxisType.Auto:
    sharding.use(model, told)
  told.place(model)
  laid = jax.device_put(tokens, NamedSharding(mesh, told.spec("batch")))
  close(run(model, laid, model.init_state(ROWS)), expected)


def test_a_mesh_in_use_that_nobody_told_the_layer_of():
  """Axes called otherwise than ours; arrays on one device."""
  call = nnx.jit(lambda layer, x: layer(x))
  expected = call(make("gated_delta_net"), X)
  with jax.set_mesh(mesh_of(AxisType.Auto)):
    close(call(make("gated_delta_net"), X), expected)


def test_inside_the_callers_shard_map():
  """Arrays are local there; rules must not shard them again."""
  mesh = mesh_of(AxisType.Auto)
  rules = sharding.rules(mesh, batch="data", heads="model")
  layer = make("gated_delta_net", rules)
  graphdef, params = nnx.split(layer)
  rows = PartitionSpec(("data", "model"))
  ids = jnp.ones(X.shape[:2], jnp.int32).at[:, 5:].set(2)

  @jax.jit
  def sharded(params, x, ids):
    return jax.shard_map(
      lambda params, x, ids: nnx.merge(graphdef, params)(x, segment_ids=ids),
      mesh=mesh,
      in_specs=(PartitionSpec(), rows, rows),
      out_specs=rows,
    )(params, x, ids)

  alone = nnx.jit(lambda layer: layer(X, segment_ids=ids))
  close(sharded(params, X, ids), alone(make("gated_delta_net")))


@pytest.mark.parametrize(
  ("axes", "said"),
  [
    ({"heads": "tensor"}, "heads='tensor': the mesh has the axes"),
    ({"head": "model"}, "there is no logical axis 'head'"),
    ({"time": ("data", "model")}, "must be one mesh axis"),
    ({"time": "model", "heads": "model"}, "mesh axis 'model'; give each"),
    (
      {"batch": ("data", "model"), "time": "data"},
      "mesh axis 'data'; give each",
    ),
  ],
)
def test_rules_that_cannot_be(axes, said):
  with pytest.raises(ValueError, match=said.replace("(", r"\(")):
    sharding.rules(mesh_of(AxisType.Auto), **axes)


def test_what_does_not_divide_is_named():
  mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
  rules = sharding.rules(mesh, heads="model")
  layer = make("trellis", rules)
  with pytest.raises(ValueError, match="heads=4 does not divide over the mesh"):
    layer(X)
  with pytest.raises(ValueError, match=r"axis 'heads' of 4 does not divide"):
    rules.place(layer)


def test_fewer_heads_of_keys_than_shards():
  """Explicit axes leave the heads whole; rules name what to change."""

  def make_layer(rules=sharding.NONE):
    return registry.MIXERS["softmax_attention"](
      WIDTH,
      **SIZES,
      kv_heads=1,
      max_length=32,
      rngs=nnx.Rngs(0),
      rules=rules,
    )

  call = nnx.jit(lambda layer, x: layer(x))
  expected = call(make_layer(), X)
  mesh = mesh_of(AxisType.Explicit)
  layer = make_layer()
  sharding.rules(mesh, batch="data", heads="model").place(layer)
  with jax.set_mesh(mesh):
    close(call(layer, X), expected)
  rules = sharding.rules(mesh_of(AxisType.Auto), heads="model")
  with pytest.raises(ValueError, match=r"^kv_heads=1 does not divide over"):
    call(make_layer(rules), X)


@pytest.mark.parametrize(
  "name",
  rotation.cases(registry.MIXERS, ["trellis", "mamba2", "softmax_attention"]),
)
def test_time_that_does_not_divide_is_named(name):
  mesh = jax.make_mesh(
    (2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  layer = make(name, sharding.rules(mesh, batch="data", time="model"))
  with pytest.raises(
    ValueError, match=r"^time=14 does not divide over the mesh"
  ):
    jax.eval_shape(layer, X[:, :14])


def test_types_that_cut_time_over_two_axes():
  spec = PartitionSpec(None, ("data", "model"))
  mesh = mesh_of(AxisType.Explicit)
  with jax.set_mesh(mesh):
    x = jax.device_put(X, NamedSharding(mesh, spec))
    with pytest.raises(ValueError, match=r"^x's time lies over the mesh axes"):
      make("gated_delta_net")(x)


def test_rules_of_another_mesh_than_that_in_use():
  rules = sharding.rules(heads="model")
  other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  with (
    jax.set_mesh(other),
    pytest.raises(ValueError, match="name the mesh axis 'model'"),
  ):
    make("trellis", rules)(X)
