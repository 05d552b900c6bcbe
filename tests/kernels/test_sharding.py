"""Level 9: eight devices compute what one does."""

import functools

import jax
import numpy as np
import pytest
import rotation
from jax.sharding import AxisType, Mesh

from memcomp_kernels.parallel import shard
from memcomp_kernels.testing import (
  errors,
  gradients,
  memories,
  subjects,
  tolerances,
)

# Whose states differ most in kind; what shards them is the same for all.
OFTEN = ("trellis",)


# Rows and heads are packed the same however they are sharded.
@pytest.mark.slow
@rotation.both_parts
@pytest.mark.parametrize("packed", rotation.cases([False, True], [True]))
@pytest.mark.parametrize("name", rotation.cases(memories.MEMORIES, OFTEN))
def test_eight_devices_equal_one(name, packed, gradient):
  memory = memories.MEMORIES[name]
  spec = next(iter(memory.specs.values()))
  sizes = {"batch": 8, "heads": 2, "key_dim": 5, "value_dim": 7}
  subject = subjects.Subject(memory, spec, "xla_chunked", tuple(sizes.items()))
  arguments = subject.state(), subject.inputs(40)
  ids = None
  if packed:
    ids = jax.numpy.asarray(
      np.arange(40)[None] // 17 + np.zeros((8, 1)), "int32"
    )

  def run(state, inputs):
    chunk = shard.shard_chunk(
      memory.op.chunk, batch_axes=("replica", "fsdp"), head_axes=("tensor",)
    )
    return chunk(
      state, inputs, spec=spec, segment_ids=ids, reset_state=arguments[0]
    )

  measured = functools.partial(
    gradients.value_and_gradients, run, arguments, gradient=gradient
  )
  expected = measured()
  devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
  with jax.set_mesh(Mesh(devices, ("replica", "fsdp", "tensor"))):
    lowered = jax.jit(run).lower(*arguments).compile().as_text()
    actual = measured()
  errors.assert_close(actual, expected, tolerances.SHARDED, "sharded")
  for collective in ("all-gather", "all-reduce", "all-to-all"):
    assert collective not in lowered  # rows and heads are independent


@pytest.mark.parametrize("name", ["trellis", "delta_rule"])
@pytest.mark.parametrize(("batch", "time"), [(0, 4), (2, 0)])
def test_nothing_over_shards_of_time(name, batch, time):
  """The two strategies that pass states on; no rows, then no tokens."""
  memory = memories.MEMORIES[name]
  spec = memory.specs[memory.typical[0]]
  sizes = {"heads": 2, "key_dim": 4, "value_dim": 4}
  key = jax.random.key(0)
  inputs = memory.make_inputs(key, spec, batch=2, time=4, **sizes)
  inputs = jax.tree.map(lambda x: x[:batch, :time], inputs)
  state = memory.make_state(key, spec, batch=2, **sizes)
  state = jax.tree.map(lambda x: x[:batch], state)
  chunk = shard.shard_chunk(
    memory.op.chunk,
    batch_axes=(),
    head_axes=(),
    time_axis="time",
    mesh=jax.make_mesh((2,), ("time",), axis_types=(AxisType.Auto,)),
    pass_state=memory.op.pass_state(spec),
  )
  for ids in (None, jax.numpy.ones((batch, time), "int32")):
    after, y = jax.eval_shape(
      functools.partial(chunk, spec=spec, segment_ids=ids, reset_state=state),
      state,
      inputs,
    )
    assert y.shape[:2] == (batch, time)
    assert jax.tree.map(np.shape, after) == jax.tree.map(np.shape, state)
