"""Time over shards: what eight devices hand over is what one computes."""

import jax
import numpy as np
import pytest
import rotation
from jax.sharding import Mesh, PartitionSpec

from memcomp_kernels import FRESH
from memcomp_kernels.parallel import shard, state_passing, wavefront
from memcomp_kernels.testing import (
  errors,
  gradients,
  memories,
  subjects,
  tolerances,
)

ATTENTION = memories.MEMORIES["softmax_attention"]
CACHE = memories.MEMORIES["tensor_cache"]


# Windows that are handed on. A test below has a wavefront, and the trainer's test
# of its mesh what is combined because it is linear in the state.
ALWAYS = ("softmax_attention-full",)

# A chunk that is longer than a shard: several start in its midst.
LONG_CHUNK = CACHE.op.Spec(window_size=18, chunk_size=16, read_norm=True)


def held(state):
  """A state with zeros where a window holds no token.

  Nobody reads these rows. Shards leave zeros there, one device what was there
  in the state that a segment began from.
  """

  def rows(x):  # [batch, heads, rows, ...]
    some = jax.numpy.arange(x.shape[2]) < state.position[:, None]
    shape = len(x), 1, x.shape[2], *[1] * (x.ndim - 3)
    return jax.numpy.where(some.reshape(shape), x, 0)

  names = {"keys", "values", "window"} & set(state._fields)
  found = {name: jax.tree.map(rows, getattr(state, name)) for name in names}
  return state._replace(**found)


def cases():
  """Of every memory its first Spec, and what has paths of its own."""
  several = {
    "softmax_attention": ATTENTION.specs,
    "tensor_cache": ("evicted-outer", "evicted-delta", "evicted-slots"),
  }
  whole = {"trellis", "delta_rule", "softmax_attention"}
  for memory in memories.MEMORIES.values():
    for name in several.get(memory.name, list(memory.specs)[:1]):
      yield f"{memory.name}-{name}", memory, memory.specs[name], True
    if memory.name in whole:
      yield f"{memory.name}-whole", memory, memory.specs[name], False
  yield "long-chunk", CACHE, LONG_CHUNK, True
  yield "cache-whole", CACHE, CACHE.specs["all-outer"], False


@pytest.mark.parametrize(
  ("memory", "spec", "packed"),
  [
    pytest.param(
      *case, id=name, marks=() if name in ALWAYS else pytest.mark.slow
    )
    for name, *case in cases()
  ],
)
def test_shards_of_time_equal_one(memory, spec, packed, monkeypatch):
  # Two heads of seven features at a time, of four.
  monkeypatch.setattr(wavefront, "_FEATURES", 14)
  sizes = {"batch": 2, "heads": 4, "key_dim": 5, "value_dim": 7}
  subject = subjects.Subject(memory, spec, "xla_chunked", tuple(sizes.items()))
  arguments = subject.state(), subject.inputs(36)
  ids = None
  if packed:
    arguments = *arguments, subjects.states_inside(subject, 2)
    # Segments within shards of nine, over them, one of padding alone.
    rows = [[1] * 4 + [2] * 20 + [3] * 12, [1] * 8 + [0] * 11 + [2] * 17]
    ids = jax.numpy.asarray(np.array(rows), "int32")

  def run(state, inputs, reset=None):
    chunk = shard.shard_chunk(
      memory.op.chunk,
      batch_axes=("fsdp",),
      head_axes=("tensor",),
      time_axis="context",
      pass_state=memory.op.pass_state(spec),
    )
    after, *y = chunk(
      state, inputs, spec=spec, segment_ids=ids, reset_state=reset
    )
    if memory in (ATTENTION, CACHE):
      after = held(after)
    return after, *y

  expected = gradients.value_and_gradients(run, arguments)
  devices = np.array(jax.devices()[:8]).reshape(1, 2, 4)
  with jax.set_mesh(Mesh(devices, ("fsdp", "tensor", "context"))):
    actual = gradients.value_and_gradients(run, arguments)
  errors.assert_close(actual, expected, tolerances.SHARDED, "sharded")


@pytest.mark.parametrize(
  "name",
  rotation.cases(
    ["delta_rule", "rwkv7", "state_space_duality"], ["state_space_duality"]
  ),
)
@pytest.mark.parametrize("field", ["key", "value"])
def test_nan_stays_in_its_document(name, field):
  """In values and gradients, as on one device.

  Shards compute with maps that a new segment makes zero, and zero times NaN is
  NaN.
  """
  memory = memories.MEMORIES[name]
  spec = next(iter(memory.specs.values()))
  sizes = {"batch": 1, "heads": 2, "key_dim": 4, "value_dim": 4}
  subject = subjects.Subject(memory, spec, "xla_chunked", tuple(sizes.items()))
  state, inputs = subject.state(), subject.inputs(16)
  broken = getattr(inputs, field).at[0, 2].set(np.nan)
  inputs = inputs._replace(**{field: broken})
  ids = jax.numpy.asarray([[1] * 6 + [2] * 8 + [0, 2]], "int32")

  def run(inputs):
    chunk = shard.shard_chunk(
      memory.op.chunk,
      batch_axes=(),
      head_axes=(),
      time_axis="context",
      pass_state=memory.op.pass_state(spec),
    )
    after, y = chunk(
      state, inputs, spec=spec, segment_ids=ids, reset_state=FRESH
    )
    return jax.numpy.sum(jax.numpy.sin(y[:, 6:])), (after, y[:, 6:])

  def second(inputs):
    (_, found), d = jax.jit(jax.value_and_grad(run, has_aux=True))(inputs)
    return found, jax.tree.map(lambda x: x[:, 6:], d)

  expected = second(inputs)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
  with jax.set_mesh(Mesh(np.array(jax.devices()[:4]), ("context",))):
    actual = second(inputs)
  errors.assert_close(actual, expected, tolerances.SHARDED, name)


@pytest.mark.parametrize("axis", ["batch", "time", "heads"])
def test_what_a_mesh_does_not_divide_is_one_line(axis):
  memory = memories.MEMORIES["trellis"]
  spec = next(iter(memory.specs.values()))
  sizes = {"batch": 2, "heads": 2, "key_dim": 3, "value_dim": 3}
  time = 7 if axis == "time" else 8
  if axis != "time":
    sizes[axis] = 3
  subject = subjects.Subject(memory, spec, "xla_chunked", tuple(sizes.items()))
  chunk = shard.shard_chunk(
    memory.op.chunk, batch_axes=("a",), head_axes=("b",), time_axis="c"
  )
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
  with (
    jax.set_mesh(mesh),
    pytest.raises(
      ValueError, match=rf"^{axis}=[37] of \w+ does not divide[^\n]*$"
    ),
  ):
    chunk(subject.state(), subject.inputs(time), spec=spec)


def test_new_segments_start_from_the_state_before_the_first_shard():
  memory = memories.MEMORIES["trellis"]
  spec = next(iter(memory.specs.values()))
  sizes = {"batch": 1, "heads": 1, "key_dim": 3, "value_dim": 3}
  subject = subjects.Subject(memory, spec, "xla_chunked", tuple(sizes.items()))
  state, inputs = subject.state(), subject.inputs(12)
  ids = jax.numpy.asarray([[1] * 8 + [2] * 4], "int32")

  def run(state, inputs):
    chunk = shard.shard_chunk(
      memory.op.chunk, batch_axes=(), head_axes=(), time_axis="context"
    )
    return chunk(state, inputs, spec=spec, segment_ids=ids, max_position=0)

  expected = run(state, inputs)
  with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("context",))):
    actual = jax.jit(run)(state, inputs)
  errors.assert_close(actual, expected, tolerances.SHARDED, "sharded")


def test_each_shard_gets_what_is_before_it_in_order():
  def then(first, second):
    (a, m), (b, n) = first, second
    return a * 10**n + b, m + n

  def digits(x):
    one, none = jax.numpy.ones_like(x), jax.numpy.zeros_like(x)
    return state_passing.scan_before(then, "context", (x, one), (none, none))[0]

  spec = PartitionSpec("context")
  with jax.set_mesh(Mesh(np.array(jax.devices()[:8]), ("context",))):
    found = jax.jit(jax.shard_map(digits, in_specs=spec, out_specs=spec))(
      jax.numpy.arange(1, 9)
    )
  np.testing.assert_array_equal(
    found, [0, 1, 12, 123, 1234, 12345, 123456, 1234567]
  )


@pytest.mark.parametrize(
  ("rows", "heads", "features", "shards", "parts"),
  [
    (16, 12, 64, 4, (16, 1)),  # of 1, 2, 4, 8, 16 the first of at least 12
    (64, 12, 64, 2, (4, 1)),
    (2, 12, 64, 4, (2, 6)),
    (1, 12, 64, 256, (1, 6)),  # two heads of 64 fill the lanes
    (1, 12, 128, 256, (1, 12)),
    (3, 1, 32, 8, (3, 1)),
  ],
)
def test_parts_are_no_more_than_help(rows, heads, features, shards, parts):
  assert wavefront.parts_for(rows, heads, features, shards) == parts


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(list(equation.params.values())):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        yield from equations(inner)


def turns(function, *arguments):
  """Lengths of the loops in whose every turn shards send to one another."""
  return [
    equation.params["length"]
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    if equation.primitive.name == "scan"
    and any(
      inner.primitive.name == "ppermute"
      for inner in equation.params["jaxpr"].jaxpr.eqns
    )
  ]


@pytest.mark.slow
def test_a_shard_waits_for_those_before_it_alone(monkeypatch):
  monkeypatch.setattr(wavefront, "_FEATURES", 7)
  memory = memories.MEMORIES["trellis"]
  spec = next(iter(memory.specs.values()))
  sizes = {"batch": 3, "heads": 2, "key_dim": 5, "value_dim": 7}
  subject = subjects.Subject(memory, spec, "xla_chunked", tuple(sizes.items()))

  def loss(inputs):
    chunk = shard.shard_chunk(
      memory.op.chunk, batch_axes=(), head_axes=(), time_axis="context"
    )
    return chunk(subject.state(), inputs, spec=spec)[1].sum()

  with jax.set_mesh(Mesh(np.array(jax.devices()[:4]), ("context",))):
    forward, backward = turns(jax.grad(loss), subject.inputs(32))
  # Six parts over four shards, of which the last waits for three turns.
  assert forward == backward == 9
