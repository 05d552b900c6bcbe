"""Key-Value Means by a TPU kernel: interpreted, lowered, compiled."""

import dataclasses
import functools
import re
from typing import Any

import generations
import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation
from jax.sharding import Mesh

from memcomp_kernels import aot, dispatch, key_value_means
from memcomp_kernels.key_value_means import budgets, xla_chunked
from memcomp_kernels.key_value_means.pallas_tpu import engine
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.parallel import shard
from memcomp_kernels.testing import (
  errors,
  gradients,
  memories,
  tolerances,
)

MEMORY = memories.MEMORIES["key_value_means"]
BY_KERNELS = MEMORY.op.implementations.functions["mosaic_tpu"]
SPEC = key_value_means.Spec(
  chunk_size=128,
  rotary_dim=4,
  budget=budgets.SaturatingBudget(300),
  max_length=1024,
)
VARIANT = dataclasses.replace(
  SPEC, value_radius=False, gate_appends=True, sink_rows=0
)
SIZES: dict[str, Any] = {"heads": 1, "key_dim": 16, "value_dim": 8}

needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def arguments(
  spec, time, *, batch=1, dtype="float32", length=None, sizes=SIZES
):
  """A fresh state and inputs."""
  sizes: dict[str, Any] = {"batch": batch, **sizes}
  inputs = MEMORY.make_inputs(jax.random.key(0), spec, time=time, **sizes)
  inputs = inputs._replace(merge_gate=inputs.merge_gate.astype("float32"))
  state = key_value_means.init_state(spec, length=length or time, **sizes)
  return state, gradients.cast_operands(inputs, dtype)


def values(chunk, spec, given, **call):
  with launch.interpreted():
    run = programs.direct(chunk)
    return jax.jit(lambda *x: run(*x, spec=spec, **call))(*given)


def assert_agree(spec, given, mode=None, *, gradient=True, **call):
  """Values, and gradients if asked for, of both forms."""

  def run(chunk):
    def function(*given):
      return programs.direct(chunk)(*given, spec=spec, **call)

    return gradients.value_and_gradients(function, given, gradient=gradient)

  with launch.interpreted(**(mode or {})):
    actual, expected = run(BY_KERNELS), run(xla_chunked.chunk)
  for a, b, bound, part in zip(
    actual,
    expected,
    (tolerances.VALUE["float32"], tolerances.GRADIENT["float32"]),
    ("values", "gradients"),
    strict=True,
  ):
    errors.assert_close(a, b, bound, part)


@pytest.mark.slow
def test_equals_the_xla_form():
  """Ragged: first rows, rows of their own and merges; strictly."""
  assert_agree(
    SPEC, arguments(SPEC, 570), interpreter.STRICT_TPU, max_position=0
  )


@rotation.both_parts
def test_packed_and_handed_off_inside_a_chunk(gradient):
  """Strictly: memory starts as nan, races are looked for."""
  fresh, drawn = arguments(SPEC, 580, batch=2, length=600)
  drawn = jax.device_get(drawn)
  prefix = jax.tree.map(lambda x: x[:, :430], drawn)
  state, _ = values(xla_chunked.chunk, SPEC, (fresh, prefix), max_position=0)
  ids = np.ones((2, 150), np.int32)
  ids[0, 100:] = 2
  ids[1, 20:25], ids[1, 25:] = 0, 3
  inputs = jax.tree.map(lambda x: x[:, 430:], drawn)
  # The first row's new segment starts afresh, the second's inside a chunk.
  reset = jax.tree.map(lambda fresh, x: x.at[0].set(fresh[0]), fresh, state)
  assert_agree(
    SPEC,
    (state, inputs),
    interpreter.STRICT_TPU,
    gradient=gradient,
    segment_ids=jnp.array(ids),
    reset_state=reset,
  )


@pytest.mark.slow
def test_other_meanings():
  given = arguments(VARIANT, 520)
  actual, expected = (
    values(form, VARIANT, given, max_position=0)
    for form in (BY_KERNELS, xla_chunked.chunk)
  )
  errors.assert_close(actual, expected, tolerances.VALUE["float32"], "values")


@pytest.mark.slow
def test_bfloat16_is_no_worse_than_the_xla_form():
  given = arguments(SPEC, 520, dtype="bfloat16")
  wide = gradients.cast(given, jnp.float32)
  truth = values(xla_chunked.chunk, SPEC, wide, max_position=0)
  xla = values(xla_chunked.chunk, SPEC, given, max_position=0)
  ours = values(BY_KERNELS, SPEC, given, max_position=0)
  errors.assert_no_worse(ours, xla, truth)


@pytest.mark.slow
def test_under_shard_map():
  """Rows and heads over a mesh: each device runs a kernel of its own."""
  state, inputs = arguments(SPEC, 400, batch=2, sizes=SIZES | {"heads": 2})

  def chunk(state, inputs):
    chunk = shard.shard_chunk(
      key_value_means.chunk, batch_axes=("fsdp",), head_axes=("tensor",)
    )
    return chunk(state, inputs, spec=SPEC, implementation="mosaic_tpu")

  with launch.interpreted():
    expected = jax.jit(chunk)(state, inputs)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    with jax.set_mesh(Mesh(devices, ("fsdp", "tensor"))):
      text = str(jax.make_jaxpr(chunk)(state, inputs))
      actual = jax.jit(chunk)(state, inputs)
  assert "shard_map" in text and "name=kvm_tile" in text
  errors.assert_close(actual, expected, tolerances.SHARDED, "sharded")


def test_says_why_not():
  state, inputs = arguments(SPEC, 3)

  def chunk(state, spec):
    return key_value_means.chunk(
      state, inputs, spec=spec, implementation="mosaic_tpu"
    )

  with pytest.raises(NotImplementedError, match="in use are of cpu"):
    chunk(state, SPEC)
  short = dataclasses.replace(SPEC, chunk_size=96)
  with (
    launch.interpreted(),
    pytest.raises(NotImplementedError, match="not a multiple of 128"),
  ):
    chunk(arguments(short, 3)[0], short)


def gradient(dim, capacity=None):
  """Forward and backward from a fresh state, and shapes of its arguments."""
  spec = key_value_means.Spec(rotary_dim=dim // 2, max_length=2**20)
  if capacity:
    spec = dataclasses.replace(spec, budget=budgets.FixedBudget(capacity))
  sizes = {"heads": 4, "key_dim": dim, "value_dim": dim}

  def given():
    return arguments(spec, 1024, dtype="bfloat16", length=2**20, sizes=sizes)

  def function(state, inputs):
    def objective(inputs):
      _, y = key_value_means.chunk(
        state, inputs, spec=spec, implementation="mosaic_tpu"
      )
      return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(objective)(inputs)

  return function, jax.eval_shape(given)


def test_lowers():
  function, given = gradient(64)
  # Kernels count in 32 bits, also where the program has 64.
  with launch.compiled(), jax.enable_x64(True):
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(*given)
  assert 'kernel_name = "kvm_tile"' in exported.mlir_module()


def test_a_block_that_cannot_fit_says_so():
  function, given = gradient(64, capacity=2**15)
  with (
    launch.compiled(),
    pytest.raises(NotImplementedError, match="bytes of VMEM, more than"),
  ):
    jax.eval_shape(function, *given)


def test_only_rows_that_can_be_live_must_fit():
  spec = dataclasses.replace(
    SPEC, budget=budgets.FixedBudget(2**16), max_length=2**20
  )
  given = jax.eval_shape(lambda: arguments(spec, 256, length=2**20))
  ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

  def reason(seen, ids=None, given=given):
    call = dispatch.Call(*given, spec, ids, max_position=seen)
    with launch.interpreted():
      return engine.unsupported(call)

  assert "bytes of VMEM" in reason(None)
  assert reason(0) is None
  assert reason(0, ids) is None
  # One more chunk is live where rows of few tokens run in pieces of more.
  few = jax.eval_shape(lambda: arguments(spec, 10, length=2**20))
  ids = jax.ShapeDtypeStruct((1, 10), jnp.int32)
  edge = next(n for n in range(0, 2**16, 128) if reason(n, ids, few)) - 10
  assert reason(edge - xla_chunked.PIECE, ids, few) is None
  assert reason(edge - xla_chunked.PIECE + 1, ids, few)


def test_rows_that_cannot_fit_are_left_to_the_xla_form(monkeypatch):
  monkeypatch.setattr(dispatch, "current_platform", lambda: "tpu")
  spec = dataclasses.replace(SPEC, budget=budgets.FixedBudget(384))
  given = arguments(spec, 256)

  def kernels(limit):
    monkeypatch.setattr(launch, "LIMIT", limit)
    chunk = functools.partial(key_value_means.chunk, spec=spec)
    with launch.interpreted():
      return str(jax.make_jaxpr(chunk)(*given)).count("name=kvm_tile")

  with launch.interpreted():
    monkeypatch.setattr(launch, "LIMIT", 0)
    reason = engine.unsupported(dispatch.Call(*given, spec)) or ""
  (needed,) = re.findall(r"needs ([\d,]+) bytes", reason)
  needed = int(needed.replace(",", ""))
  assert kernels(needed) and not kernels(needed - 1)


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
  ("topology", "dim"), generations.spread([64, 128], slow=lambda dim: dim == 64)
)
def test_compiles(topology, dim):
  function, given = gradient(dim)
  with launch.compiled():
    compiled = aot.compile_for(topology, function, *given)
  assert "kvm_tile" in compiled.as_text()
