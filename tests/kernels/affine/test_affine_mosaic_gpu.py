"""GPU kernels of affine tiles: interpreted, against the XLA forms; lowered.

Without a GPU: the interpreter knows shared memory, copies and barriers, and
lowering finds layouts that matrix units cannot take. With a Hopper GPU and
JAX_PLATFORMS=cuda,cpu the same tests run the kernels there, in place of
interpreting them.
"""

import dataclasses
import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import dispatch
from memcomp_kernels.pallas_gpu import smem, tile_kernel
from memcomp_kernels.pallas_gpu.affine import prepared
from memcomp_kernels.testing import errors, gradients, memories

SPECS = {
  "delta_rule": "gated",  # erases
  "state_space_duality": "shared",  # heads share keys
}


@gradients.on_cpu
def arguments(name, spec, time, *, key_dim=64, value_dim=64, batch=1):
  """A state, another that segments start from, and inputs in bfloat16."""
  memory = memories.MEMORIES[name]
  sizes = {
    "batch": batch,
    "heads": 2,
    "key_dim": key_dim,
    "value_dim": value_dim,
  }
  inputs = memory.make_inputs(jax.random.key(0), spec, time=time, **sizes)
  states = [memory.make_state(jax.random.key(i), spec, **sizes) for i in (1, 2)]
  return *states, gradients.cast_operands(inputs, "bfloat16")


def function(form, spec, ids=None):
  def run(state, fresh, inputs):
    return form(state, inputs, spec=spec, segment_ids=ids, reset_state=fresh)

  return run


def implementation(name, form):
  functions = memories.MEMORIES[name].op.implementations.functions
  return programs.direct(functions[form])


def check(name, spec, given, ids=None, *, gradient=True, **mode):
  """Kernels err by no more than twice what the XLA form errs by itself."""
  xla = implementation(name, "xla_chunked")
  of = functools.partial(gradients.value_and_gradients, gradient=gradient)
  on_cpu = gradients.on_cpu(of)
  truth = on_cpu(
    function(memories.MEMORIES[name].op.reference, spec, ids),
    gradients.cast(given, jnp.float32),
  )
  expected = on_cpu(function(xla, spec, ids), given)
  kernels = implementation(name, "mosaic_gpu")
  with tile_kernel.tried(**mode):
    actual = of(function(kernels, spec, ids), given)
  errors.assert_no_worse(actual, expected, truth)


@pytest.fixture
def busy(monkeypatch):
  """As with more blocks of threads than multiprocessors."""
  monkeypatch.setattr(smem, "MULTIPROCESSORS", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "dims"),
  [
    ("delta_rule", (64, 64)),
    ("delta_rule", (128, 128)),
    ("delta_rule", (64, 192)),  # three blocks of columns
    ("state_space_duality", (64, 64)),
  ],
)
def test_equals_the_xla_form(name, dims, busy):
  """A last tile that is not full, and memories handed on."""
  spec = memories.MEMORIES[name].specs[SPECS[name]]
  given = arguments(name, spec, 75, key_dim=dims[0], value_dim=dims[1])
  check(name, spec, given)


@rotation.both_parts
@pytest.mark.parametrize("name", rotation.cases(SPECS, ["delta_rule"]))
def test_packing(name, gradient):
  """Strictly: memory starts as nan, races are looked for. Few blocks."""
  spec = memories.MEMORIES[name].specs[SPECS[name]]
  ids = np.zeros((2, 70), np.int32)
  ids[0] = 1  # goes on
  ids[1, 3:40], ids[1, 45:] = 5, 2
  given = arguments(name, spec, 70, batch=2)
  check(
    name,
    spec,
    given,
    jnp.array(ids),
    gradient=gradient,
    **interpreter.STRICT_GPU,
  )


TENSOR_CACHE = {
  "all": {"window_size": 9, "chunk_size": 8, "rule": "delta", "num_slots": 2},
  "evicted": {
    "window_size": 6,
    "write_population": "evicted",
    "read_norm": True,
  },
}


def tensor_cache(name):
  spec_type = memories.MEMORIES["tensor_cache"].op.Spec
  return spec_type(**TENSOR_CACHE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR_CACHE)
def test_tensor_cache(name):
  spec = tensor_cache(name)
  given = arguments("tensor_cache", spec, 30)
  check(
    "tensor_cache",
    spec,
    given,
    jnp.array([[1] * 10 + [2] * 20]),
    **interpreter.STRICT_GPU,
  )


def lower(name, spec, given):
  """Of values and gradients, for a GPU: the program's text."""
  kernels = function(implementation(name, "mosaic_gpu"), spec)

  def both(*given):
    return gradients.value_and_gradients(kernels, given)

  with tile_kernel.lowered():
    traced = jax.jit(both).trace(*given)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
  "dims",
  [
    (64, 64),
    *(
      pytest.param(dims, marks=pytest.mark.slow)
      for dims in ((128, 128), (128, 64), (64, 128))
    ),
  ],
  ids=str,
)
def test_lowers(dims):
  spec = memories.MEMORIES["delta_rule"].specs["gated"]
  given = arguments("delta_rule", spec, 130, key_dim=dims[0], value_dim=dims[1])
  assert lower("delta_rule", spec, given).count("mosaic_gpu_v2") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "evicted"])
def test_tensor_cache_lowers(name):
  spec = tensor_cache(name)
  given = arguments("tensor_cache", spec, 30)
  assert lower("tensor_cache", spec, given).count("mosaic_gpu_v2") >= 3


def test_tried_on_a_gpu_is_not_interpreted(monkeypatch):
  monkeypatch.setattr(tile_kernel, "unavailable", lambda: "no GPU")
  with tile_kernel.tried(detect_races=True):
    assert tile_kernel.interpret().detect_races
  monkeypatch.setattr(tile_kernel, "unavailable", lambda: None)
  with tile_kernel.tried(detect_races=True):
    assert tile_kernel.interpret() is False


def test_says_why_not(monkeypatch):
  monkeypatch.setattr(dispatch, "current_platform", lambda: "cpu")
  api = memories.MEMORIES["delta_rule"].op
  spec = memories.MEMORIES["delta_rule"].specs["gated"]
  state, _, inputs = arguments("delta_rule", spec, 8)

  def chunk(state, inputs, spec=spec, name="delta_rule"):
    api = memories.MEMORIES[name].op
    return api.chunk(state, inputs, spec=spec, implementation="mosaic_gpu")

  with pytest.raises(NotImplementedError, match="devices in use are of cpu"):
    chunk(state, inputs)
  with tile_kernel.lowered():
    wide = inputs._replace(query=inputs.query.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="must all be bfloat16"):
      chunk(state, wide)
    narrow, _, few = arguments("delta_rule", spec, 8, key_dim=32)
    with pytest.raises(NotImplementedError, match="key_dim=32 is none of"):
      chunk(narrow, few)
    narrow, _, few = arguments("delta_rule", spec, 8, value_dim=32)
    with pytest.raises(
      NotImplementedError, match="value_dim=32 is no multiple"
    ):
      chunk(narrow, few)
    long = dataclasses.replace(
      tensor_cache("all"), window_size=128, chunk_size=128
    )
    given = arguments("tensor_cache", long, 8)
    with pytest.raises(NotImplementedError, match="chunk_size=128 is more"):
      chunk(given[0], given[2], long, "tensor_cache")
  assert api.implementations.default("gpu") == "mosaic_gpu"


@pytest.mark.slow
def test_packing_of_many_blocks(busy):
  test_packing("delta_rule", gradient=True)


def test_few_blocks_have_half_the_columns():
  def columns(batch, width):
    saved = jnp.zeros((0, batch, 16, 64, width))
    return prepared.block_columns(saved)

  assert columns(4, 64) == columns(2, 128) == 32  # 128 blocks on 132
  assert columns(5, 64) == columns(4, 128) == 64


def test_many_blocks_share_multiprocessors():
  """Two to one: a slot less for results, as long as operands are prefetched."""
  kib = jax.ShapeDtypeStruct((1024,), jnp.int8)
  eight, sixteen = (jax.ShapeDtypeStruct((n, 1024), jnp.int8) for n in (8, 16))

  def slots(operands, blocks):
    given = [eight] * operands, {"x": sixteen}, [kib], "a kernel"
    return smem.slots(*given, steps=9, blocks=blocks)

  assert slots(4, 132) == (2, {"x": 2})
  assert slots(4, 133) == (2, {"x": 2})  # 100 KiB
  assert slots(5, 132) == (2, {"x": 2})
  assert slots(5, 133) == (2, {"x": 1})  # 100 KiB; with two 116
  assert slots(9, 133) == slots(9, 1) == (2, {"x": 2})  # only one has room
