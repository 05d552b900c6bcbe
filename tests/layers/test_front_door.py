"""A layer in anybody's code: a width, options by keyword, one-line mistakes."""

import copy
import dataclasses
import inspect
import pickle
import re

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp import layers
from memcomp.layers import base, registry

# The shapes in the signatures, checked as the calls run.
checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)
CALL, STEP = checked(base.Mixer.__call__), checked(base.Mixer.step)
X = jax.ShapeDtypeStruct((2, 8, 64), jnp.float32)


@pytest.mark.parametrize("name", registry.MIXERS)
@pytest.mark.parametrize(
  "dtype", rotation.cases(["float32", "bfloat16", "float64"], ["float32"])
)
def test_a_width_is_enough(name, dtype):
  mixer = registry.MIXERS[name]
  assert getattr(layers, mixer.__name__) is mixer
  assert getattr(layers, mixer.Config.__name__) is mixer.Config
  with jax.enable_x64(dtype == "float64"):
    x = jax.ShapeDtypeStruct(X.shape, dtype)

  def whole(x):
    layer = mixer(64, rngs=nnx.Rngs(0))
    y, state = CALL(layer, x, state=layer.init_state(2))
    return CALL(layer, x), y, STEP(layer, x[:, 0], state)

  with jax.enable_x64(dtype == "float64"):
    alone, y, (y_t, _) = jax.eval_shape(whole, x)
  assert alone.shape == y.shape == x.shape and y_t.shape == (2, 64)
  assert alone.dtype == y.dtype == y_t.dtype == x.dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.MIXERS)
def test_exported_for_any_batch(name):
  """By `jax.export`: calls, calls that read on, and steps."""
  layer = registry.MIXERS[name](64, heads=2, rngs=nnx.Rngs(0))

  def whole(x):
    y, state = layer(x, layer.init_state(x.shape[0]))
    return layer(x), y, layer.step(x[:, 0], state)[0]

  (batch,) = jax.export.symbolic_shape("batch")
  run = jax.jit(whole)
  exported = jax.export.export(run)(
    jax.ShapeDtypeStruct((batch, *X.shape[1:]), X.dtype)
  )
  x = np.random.default_rng(0).standard_normal((3, *X.shape[1:])).astype("f")
  for found, expected in zip(exported.call(x), run(x), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", registry.MIXERS)
def test_a_copy_and_one_from_a_file_are_the_same_layer(name):
  """So that `jax.jit` does not compile them again."""
  layer = nnx.eval_shape(lambda: registry.MIXERS[name](64, rngs=nnx.Rngs(0)))
  for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
    assert nnx.graphdef(other) == nnx.graphdef(layer)


@pytest.mark.parametrize(
  ("name", "options", "width"),
  [("rwkv7", {}, 128), ("softmax_attention", {"value_residual": "static"}, 64)],
)
def test_values_of_the_first_layer_are_not_broadcast(name, options, width):
  layer = nnx.eval_shape(
    lambda: registry.MIXERS[name](64, heads=1, rngs=nnx.Rngs(0), **options)
  )
  graph, params = nnx.split(layer)

  def call(shape, step):
    def run(params, first_value):
      layer, x = nnx.merge(graph, params), jnp.ones(X.shape)
      if step:
        return layer.step(x[:, 0], layer.init_state(2), first_value=first_value)
      return layer(x, first_value=first_value)

    first = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(run, params, first)

  call((2, 8, width), False), call((2, width), True)
  kind = type(layer).__name__
  for shape, step in (
    ((2, 1, width), False),
    ((1, 8, width), False),
    ((width,), False),
    ((1, width), True),
    ((2, 1, width), True),
  ):
    axes = "[batch, width]" if step else "[batch, time, width]"
    said = f"{kind}: first_value has shape {shape}, expected {axes} as x, whose"
    with pytest.raises(ValueError, match=re.escape(said)):
      call(shape, step)
  for shape, step in (((2, 8, 1), False), ((2, 1), True)):
    with pytest.raises(ValueError, match=f"has width 1, expected {width}; it"):
      call(shape, step)


@pytest.mark.parametrize("name", registry.MIXERS)
@pytest.mark.parametrize("shape", [(0, 8, 64), (2, 0, 64)], ids=str)
def test_nothing_gives_nothing(name, shape):
  """No rows, or no tokens."""

  def whole(x):
    layer = registry.MIXERS[name](64, rngs=nnx.Rngs(0))
    state = layer.init_state(len(x))
    ids = jnp.ones(x.shape[:2], jnp.int32)

    def total(x):
      y = layer(x)
      return y.sum(), y

    gradient, y = jax.grad(total, has_aux=True)(x)
    return y, layer(x, state, segment_ids=ids)[0], gradient

  for y in jax.eval_shape(whole, jax.ShapeDtypeStruct(shape, jnp.float32)):
    assert y.shape == shape


@pytest.mark.parametrize("name", registry.MIXERS)
def test_a_config_makes_the_same_layer(name):
  mixer = registry.MIXERS[name]

  def both():
    a = mixer(64, heads=1, rngs=nnx.Rngs(3))
    b = mixer.from_config(mixer.Config(heads=1), 64, rngs=nnx.Rngs(3))
    return nnx.state(a), nnx.state(b)

  a, b = jax.eval_shape(both)
  assert jax.tree.map(jnp.shape, a) == jax.tree.map(jnp.shape, b)


@pytest.mark.parametrize("name", registry.MIXERS)
def test_sizes_that_are_given_stay(name):
  config = registry.config_of(name)(heads=3, key_dim=8, value_dim=8)
  filled = config.at_width(100)
  assert (filled.heads, filled.key_dim, filled.value_dim) == (3, 8, 8)
  assert filled.at_width(100) == filled


@pytest.mark.parametrize(
  ("name", "d_model", "sizes"),
  [
    ("trellis", 512, (8, 64, 64)),
    ("trellis", 32, (1, 32, 32)),
    ("trellis", 768, (12, 64, 64)),
    ("delta_net", 1024, (8, 128, 128)),
    ("gated_delta_net", 2048, (6, 256, 512)),
    ("gated_delta_net", 512, (6, 64, 128)),
    ("mamba2", 768, (24, 128, 64)),
    ("rwkv7", 768, (12, 64, 64)),
  ],
)
def test_sizes_follow_the_published_rule(name, d_model, sizes):
  config = registry.config_of(name)().at_width(d_model)
  assert (config.heads, config.key_dim, config.value_dim) == sizes


@pytest.mark.parametrize(
  ("name", "share"),
  [
    ("softmax_attention", 64),
    ("key_value_means", 32),
    ("test_time_training", 64),
    ("bounded_memory", 32),
    ("ovq", 0),
  ],
)
def test_rotated_channels_follow_the_key(name, share):
  assert registry.config_of(name)().at_width(128).rotary_dim == share


MISTAKES = [
  (
    TypeError,
    {"head": 4},
    "Trellis has no option 'head'; did you mean heads?",
  ),
  (
    ValueError,
    {"heads": 5},
    "Trellis: heads=5 does not divide 32 features (d_model=32); give key_dim,"
    " or other heads",
  ),
  (
    ValueError,
    {"convolution_width": 1},
    "Trellis: convolution_width=1 must be 0 or at least 2",
  ),
  (
    ValueError,
    {"heads": "4"},
    "Trellis: heads='4' is str, not an integer",
  ),
  (
    ValueError,
    {"key_dim": 1.5},
    "Trellis: key_dim=1.5 is float, not an integer",
  ),
  (
    ValueError,
    {"separate_gates": "False"},
    "Trellis: separate_gates='False' is str, not True or False",
  ),
  (
    ValueError,
    {"decay_init": "0.9"},
    "Trellis: decay_init='0.9' is str, not a number",
  ),
  (
    ValueError,
    {"solver": "sweeps"},
    "Trellis: solver='sweeps' must be a SolverConfig, such as"
    ' SolverConfig(method="sweeps")',
  ),
]


@pytest.mark.parametrize(("error", "options", "said"), MISTAKES)
def test_mistakes_are_one_line(error, options, said):
  with pytest.raises(error) as caught:
    layers.Trellis(32, **options, rngs=nnx.Rngs(0))
  assert str(caught.value) == said


def test_a_width_is_any_integer_and_only_sizes_must_divide():
  assert layers.Trellis(np.int64(32), rngs=nnx.Rngs(0)).d_model == 32
  layer = layers.TestTimeTraining(100, heads=3, key_dim=16, rngs=nnx.Rngs(0))
  assert (layer.key_dim, layer.value_dim) == (16, 16)


@pytest.mark.parametrize("width", [0, -3, 2.5, "512", True])
def test_a_width_that_is_none(width):
  with pytest.raises(ValueError, match=r"Lattice: d_model=.* must be a width"):
    layers.Lattice(width, rngs=nnx.Rngs(0))


def test_an_input_of_another_width():
  layer = layers.Trellis(32, heads=4, rngs=nnx.Rngs(0))
  said = (
    r"Trellis: x has shape \(8, 32, 16\), expected \[batch, time, d_model=32"
  )
  with pytest.raises(ValueError, match=said):
    layer(np.zeros((8, 32, 16), np.float32))
  with pytest.raises(ValueError, match=r"expected \[batch, d_model=32\]"):
    layer.step(np.zeros((8, 1, 32), np.float32), None)


def test_what_does_not_fit_the_input_is_one_line():
  layer, x = layers.Trellis(32, rngs=nnx.Rngs(0)), jnp.zeros((2, 8, 32))
  for batch in (-1, 2.0, "2", None):
    with pytest.raises(ValueError, match=r"Trellis: batch=.* must be an integ"):
      layer.init_state(batch)
  with pytest.raises(ValueError, match="Trellis: length=-1 must be an integer"):
    layer.init_state(2, -1)
  rows = r"Trellis: state has 3 rows, x has 2; make it by init_state\(2\)"
  with pytest.raises(ValueError, match=rows):
    layer(x, layer.init_state(3))
  with pytest.raises(ValueError, match=rows):
    layer.step(x[:, 0], layer.init_state(3))
  for other, kind in (
    ((x,), "tuple"),
    (layer.init_state(2).memory, r"memcomp_kernels\.trellis\.\w+\.State"),
  ):
    with pytest.raises(TypeError, match=f"Trellis: state is of type {kind}; m"):
      layer(x, other)
  other = layers.Lattice(32, rngs=nnx.Rngs(0)).init_state(2)
  with pytest.raises(TypeError, match=r"lattice\.\w+\.State; make it"):
    layer(x, other)
  longer = layers.Trellis(32, convolution_width=8, rngs=nnx.Rngs(0))
  said = r"Trellis: state.query_taps has shape \(2, 7, 32\), expected"
  for call in (layer, lambda x, s: layer.step(x[:, 0], s)):
    with pytest.raises(ValueError, match=said):
      call(x, longer.init_state(2))
  narrow = layers.KeyValueMeans(32, heads=4, rngs=nnx.Rngs(0)).init_state(2)
  wide = layers.KeyValueMeans(32, heads=2, rngs=nnx.Rngs(0))
  said = (
    r"KeyValueMeans: state.memory.keys has shape \(2, 4, 256, 8\), expected"
    r" \[batch=2, heads=2, rows=256, key_dim=16\]; make it by this layer's init"
  )
  with pytest.raises(ValueError, match=said):
    wide(x, narrow)
  by_token = layers.Trellis(32, gradient_at="token", rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="make it by this layer's init") as error:
    layer(x, by_token.init_state(2))
  assert "same spec" not in str(error.value)
  said = r"Trellis: segment_ids has shape \(2, 9\), expected \(2, 8\), as x"
  with pytest.raises(ValueError, match=said):
    layer(x, segment_ids=jnp.zeros((2, 9), int))
  for call, said in (
    (lambda: layer(x.astype(int)), "x has dtype int32, expected a floating"),
    (lambda: layer(x.tolist()), "x is of type list, expected an array"),
    (lambda: layer(None), "x is of type NoneType, expected an array"),
    (lambda: layer(x, segment_ids=[[1]]), "segment_ids is of type list, exp"),
  ):
    with pytest.raises((TypeError, ValueError), match=f"Trellis: {said}"):
      call()
  said = r"Trellis: state is missing; make the first by init_state\(2\)"
  for call in (layer.with_stats, lambda x, s: layer.step(x[:, 0], s)):
    with pytest.raises(TypeError, match=said):
      call(x, None)
  with pytest.raises(TypeError, match="rngs is of type int, expected flax"):
    layers.Trellis(32, rngs=0)
  with pytest.raises(TypeError, match="LatticeConfig, expected TrellisConfig"):
    layers.Trellis.from_config(layers.LatticeConfig(), 32, rngs=nnx.Rngs(0))


def test_shapes_in_the_signatures_are_checked():
  layer = layers.Trellis(32, heads=4, rngs=nnx.Rngs(0))
  with pytest.raises(jaxtyping.TypeCheckError, match="batch time d_model"):
    CALL(layer, jnp.zeros((8, 32)))
  with pytest.raises(jaxtyping.TypeCheckError, match="batch time"):
    CALL(layer, jnp.zeros((2, 8, 32)), segment_ids=jnp.zeros((2, 9), int))


@pytest.mark.parametrize("name", registry.MIXERS)
def test_help_says_what_every_option_means(name):
  mixer = registry.MIXERS[name]
  listed = mixer.__doc__.partition("\nOptions:\n")[2]
  for field in dataclasses.fields(mixer.Config):
    assert re.search(rf"^  {field.name}: \S", listed, re.MULTILINE), field.name


def test_help_shows_every_option():
  shown = inspect.signature(layers.GatedDeltaNet).parameters
  assert shown["convolution_width"].default == 4
  assert list(shown)[:5] == ["d_model", "rngs", "std", "out_std", "rules"]


@pytest.mark.parametrize(
  "name",
  rotation.cases(
    registry.MIXERS, ["trellis", "lattice", "key_value_means", "tensor_cache"]
  ),
)
def test_a_fresh_state_may_be_donated(name):
  """No buffer stands in it twice, and none is a parameter's."""
  layer = registry.MIXERS[name](64, rngs=nnx.Rngs(0))
  state = layer.init_state(1, 16)
  kept = [p.unsafe_buffer_pointer() for p in jax.tree.leaves(nnx.state(layer))]
  own = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state) if a.size]
  assert len(set(own)) == len(own)
  assert not set(own) & set(kept)


@pytest.mark.parametrize("name", registry.MIXERS)
def test_memories_are_arrays_of_the_state(name):
  mixer = registry.MIXERS[name]

  def whole():
    layer = mixer(64, rngs=nnx.Rngs(0))
    state = layer.init_state(2, 16)
    return layer.memories(state), state

  found, state = jax.eval_shape(whole)
  shapes = [(a.shape, a.dtype) for a in jax.tree.leaves(state)]
  assert found and all((a.shape, a.dtype) in shapes for a in found)
  assert all(a.shape[0] == 2 and a.ndim >= 3 for a in found)
