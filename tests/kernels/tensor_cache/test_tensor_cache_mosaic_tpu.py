"""Tensor Cache by TPU kernels, interpreted, against the XLA form."""

import dataclasses

import interpreter
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import rotation

from memcomp_kernels import contract, dispatch, tensor_cache
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.softmax_attention import library_tpu
from memcomp_kernels.tensor_cache import mosaic_tpu, xla_chunked
from memcomp_kernels.testing import (
  errors,
  gradients,
  memories,
  tolerances,
)

MEMORY = memories.MEMORIES["tensor_cache"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 8, "value_dim": 4}
EVICTED = tensor_cache.Spec(window_size=6, write_population="evicted")
BY_CHUNK = tensor_cache.Spec(window_size=9, chunk_size=8)
SPECS = {
  "outer": BY_CHUNK,
  "delta": dataclasses.replace(BY_CHUNK, rule="delta", read_norm=True),
  "lanes": dataclasses.replace(
    BY_CHUNK, rule="delta", num_slots=2, timescales=2
  ),
  "evicted": dataclasses.replace(
    EVICTED, read_after_write=True, read_norm=True
  ),
  "evicted-delta": dataclasses.replace(
    EVICTED, rule="delta", num_slots=2, sink_tokens=1
  ),
}
IDS = np.zeros((2, 30), np.int32)
IDS[0, :27] = 1  # goes on
IDS[1, 3:14], IDS[1, 17:] = 5, 2


def arguments(spec, time, dtype="float32"):
  """A state (inside a chunk, if there are any), a fresh one, and inputs."""
  states = [MEMORY.make_state(jax.random.key(i), spec, **SIZES) for i in (1, 2)]
  state, fresh = states
  if spec.chunked:  # whose start is another memory
    state = state._replace(starts=fresh.memories, position=state.position + 3)
  inputs = MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES)
  return state, fresh, gradients.cast_operands(inputs, dtype)


def no_attention(call):
  """Local attention is tested by itself."""
  return call.state, jnp.zeros_like(call.inputs.value)


def run(memory, spec, given, ids=None, *, gradient=True, **mode):
  """Values, and gradients if asked for, by one form of the memory."""

  def function(state, fresh, inputs):
    return xla_chunked.chunk(
      dispatch.Call(state, inputs, spec, ids, fresh),
      kernels=xla_chunked.Kernels(no_attention, memory),
    )

  with launch.interpreted(**mode):
    return gradients.value_and_gradients(function, given, gradient=gradient)


def assert_close(actual, expected):
  for a, b, bound, part in zip(
    actual,
    expected,
    (tolerances.VALUE["float32"], tolerances.GRADIENT["float32"]),
    ("values", "gradients"),
    strict=True,
  ):
    errors.assert_close(a, b, bound, part)


# Lanes are of the delta rule; those that leave a window go in as all do.
@rotation.both_parts
@pytest.mark.parametrize("name", rotation.cases(SPECS, ["lanes"]))
def test_packing(name, gradient):
  """Strictly: memory starts as nan, races are looked for."""
  spec, ids = SPECS[name], jnp.array(IDS)
  given = spec, arguments(spec, ids.shape[1]), ids
  assert_close(
    run(
      mosaic_tpu.ENGINE.memory,
      *given,
      gradient=gradient,
      **interpreter.STRICT_TPU,
    ),
    run(xla_chunked.memory, *given, gradient=gradient),
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outer", "evicted-delta"])
def test_one_segment(name):
  """Ragged, from inside a chunk into another."""
  given = arguments(SPECS[name], 22)
  assert_close(
    run(mosaic_tpu.ENGINE.memory, SPECS[name], given),
    run(xla_chunked.memory, SPECS[name], given),
  )


@pytest.mark.slow
def test_segments_that_start_inside_a_chunk():
  spec, ids = SPECS["outer"], jnp.array(IDS)
  state, fresh, inputs = arguments(spec, ids.shape[1])
  given = state, state, inputs
  del fresh
  assert_close(
    run(mosaic_tpu.ENGINE.memory, spec, given, ids),
    run(xla_chunked.memory, spec, given, ids),
  )


@pytest.mark.parametrize(
  "name", [pytest.param("delta", marks=pytest.mark.slow), "evicted"]
)
@pytest.mark.slow
def test_bfloat16_is_no_worse_than_the_xla_form(name):
  """Than twice its error, or one rounding."""
  spec = SPECS[name]
  given = arguments(spec, 24, "bfloat16")
  truth = run(xla_chunked.memory, spec, gradients.cast(given, jnp.float32))
  xla = run(xla_chunked.memory, spec, given)
  ours = run(mosaic_tpu.ENGINE.memory, spec, given)
  errors.assert_no_worse(ours, xla, truth, floor=2**-8)


def test_packed_bfloat16_can_fall_back_on_the_xla_form():
  """Both have reads of one dtype. The call is traced, not run."""
  spec = tensor_cache.Spec(window_size=64, chunk_size=64)
  sizes = {"batch": 2, "heads": 2, "key_dim": 64, "value_dim": 64}
  inputs = MEMORY.make_inputs(jax.random.key(0), spec, time=128, **sizes)
  inputs = gradients.cast_operands(inputs, "bfloat16")

  def call(state, inputs, ids):
    return tensor_cache.chunk(
      state,
      inputs,
      spec=spec,
      segment_ids=ids,
      reset_state=state,
      implementation="mosaic_tpu",
    )[1]

  state = tensor_cache.init_state(spec, **sizes)
  with launch.interpreted():
    y = jax.eval_shape(call, state, inputs, jnp.ones((2, 128), jnp.int32))
  assert y.dtype == jnp.bfloat16


@pytest.mark.slow
def test_under_shard_map():
  """Rows and heads over a mesh: each device runs a kernel of its own."""
  spec = SPECS["outer"]
  state, _, inputs = arguments(spec, 16)
  with launch.interpreted():
    alone, over = meshes.alone_and_over_a_mesh(
      tensor_cache.chunk,
      (state, None, inputs),
      spec=spec,
      implementation="mosaic_tpu",
      differentiate=False,
    )
  errors.assert_close(over, alone, tolerances.SHARDED, "sharded")


@pytest.mark.slow
def test_the_window_goes_by_splash_attention(monkeypatch):
  """Where it can: from a fresh state, in packed rows too."""
  calls, right = [], library_tpu.chunk

  def counted(call):
    calls.append(call)
    return right(call)

  monkeypatch.setattr(library_tpu, "chunk", counted)
  sizes = {"batch": 1, "heads": 1, "key_dim": 64, "value_dim": 64}
  state = tensor_cache.init_state(EVICTED, **sizes)
  inputs = MEMORY.make_inputs(jax.random.key(0), EVICTED, time=20, **sizes)
  ids = jnp.array([[1] * 12 + [2] * 8])

  def chunk(name, max_position=None, reset_state=None):
    return tensor_cache.chunk(
      state,
      inputs,
      spec=EVICTED,
      segment_ids=ids,
      reset_state=reset_state,
      max_position=max_position,
      implementation=name,
    )

  with launch.interpreted():
    expected = chunk("xla_chunked", max_position=0)
    actual = chunk("mosaic_tpu", max_position=0)
    errors.assert_close(actual, expected, 1e-5, "splash")
    assert len(calls) == 1
    jax.eval_shape(lambda: chunk("mosaic_tpu", reset_state=contract.FRESH))
    jax.eval_shape(
      lambda: chunk("mosaic_tpu", max_position=0, reset_state=state)
    )
  assert len(calls) == 1


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"rule": "wedge"}, 'no kernel for rule="wedge"'),
    ({"chunk_mean": True}, "no kernel for chunk_mean=True"),
  ],
)
def test_says_why_not(changes, reason):
  spec = dataclasses.replace(BY_CHUNK, **changes)
  sizes = {"batch": 1, "heads": 1, "key_dim": 4, "value_dim": 4}
  state = tensor_cache.init_state(spec, **sizes)
  inputs = MEMORY.make_inputs(jax.random.key(0), spec, time=3, **sizes)
  with pytest.raises(NotImplementedError, match="in use are of cpu"):
    tensor_cache.chunk(state, inputs, spec=spec, implementation="mosaic_tpu")
  with launch.interpreted(), pytest.raises(NotImplementedError, match=reason):
    tensor_cache.chunk(state, inputs, spec=spec, implementation="mosaic_tpu")
