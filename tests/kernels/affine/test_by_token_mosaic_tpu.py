"""Kernels that read tokens where they lie, interpreted, against XLA forms.

State space duality (own and shared keys, skips), the delta rule, and Tensor
Cache in each order of reads and writes, at sizes that fill lanes and that do
not.
"""

import dataclasses

import interpreter
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import rotation

from memcomp_kernels import delta_rule as delta_api
from memcomp_kernels import dispatch, shapes
from memcomp_kernels import state_space_duality as duality_api
from memcomp_kernels import tensor_cache as tensor_cache_api
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.delta_rule import mosaic_tpu as delta
from memcomp_kernels.delta_rule import tile as delta_tile
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.pallas_tpu.affine import call, engine, prepared
from memcomp_kernels.state_space_duality import mosaic_tpu as duality
from memcomp_kernels.state_space_duality import tile as duality_tile
from memcomp_kernels.tensor_cache import affine_form
from memcomp_kernels.tensor_cache import mosaic_tpu as tensor_cache
from memcomp_kernels.testing import (
  checks,
  errors,
  gradients,
  memories,
  tolerances,
)

TILE = 16
EVICTED = tensor_cache_api.Spec(window_size=20, write_population="evicted")
BY_CHUNK = tensor_cache_api.Spec(window_size=20, chunk_size=TILE)
DELTA = {"rule": "delta"}
CASES = {
  # spec, heads, key dim, value dim
  "own": (duality_api.Spec(skip=False), 4, 16, 16),
  "skip": (duality_api.Spec(), 2, 8, 16),
  "shared": (duality_api.Spec(heads_per_group=8), 8, 16, 8),
  "parts": (duality_api.Spec(heads_per_group=16), 16, 16, 64),
  "groups": (duality_api.Spec(heads_per_group=2), 8, 32, 64),
  "chunk": (BY_CHUNK, 2, 16, 8),
  "before": (EVICTED, 2, 16, 8),
  "after": (
    dataclasses.replace(EVICTED, read_after_write=True, timescales=2),
    2,
    16,
    64,
  ),
  "delta": (delta_api.Spec(), 2, 16, 16),
  "delta-ungated": (delta_api.Spec(forget_gate=False, scale=0.5), 4, 32, 64),
  "delta-chunk": (dataclasses.replace(BY_CHUNK, **DELTA), 2, 16, 8),
  "delta-before": (
    dataclasses.replace(EVICTED, timescales=2, **DELTA),
    2,
    16,
    64,
  ),
}
MODULES = {
  # its name, algebra of a tile, engine
  duality_api.Spec: ("state_space_duality", duality_tile, duality.ENGINE),
  delta_api.Spec: ("delta_rule", delta_tile, delta.ENGINE),
  tensor_cache_api.Spec: ("tensor_cache", affine_form, tensor_cache.ENGINES),
}
IDS = np.zeros((2, 75), np.int32)
IDS[0, :70] = 1  # goes on
IDS[1, 3:40], IDS[1, 45:] = 5, 2


def arguments(name, time, dtype="float32"):
  """The chunk form's parts of a state and of a fresh one, and inputs."""
  spec, heads, key_dim, value_dim = CASES[name]
  sizes = {
    "batch": 2,
    "heads": heads,
    "key_dim": key_dim,
    "value_dim": value_dim,
  }
  is_cache = isinstance(spec, tensor_cache_api.Spec)
  memory_of = memories.MEMORIES[MODULES[type(spec)][0]]
  inputs = memory_of.make_inputs(jax.random.key(0), spec, time=time, **sizes)
  inputs = gradients.cast_operands(inputs, dtype)
  lanes = heads * (spec.timescales if is_cache else 1)
  keys = jax.random.split(jax.random.key(1), 4)
  held = [
    0.3 * jax.random.normal(key, (2, lanes, key_dim, value_dim)) for key in keys
  ]
  by_chunk = is_cache and spec.chunked
  inputs = shapes.without_unused(inputs, spec)
  if is_cache:
    inputs = inputs._replace(read_route=None, read_mix=None)
  position = jnp.array([3, 0]) if by_chunk else None
  ids = jnp.full(2, 1, jnp.int32)

  def state(memory, start, position):
    if not is_cache:
      return memory_of.op.State(memory, ids)
    return affine_form.MemoryState(
      memory, start if by_chunk else None, position, ids
    )

  state, fresh = (
    state(*held[:2], position),
    state(*held[2:], None if position is None else jnp.zeros(2, jnp.int32)),
  )
  return spec, (state, fresh, inputs)


def form(spec, engine, inputs, tile_time=TILE):
  """The memory under the chunk form."""
  _, forms, _ = MODULES[type(spec)]
  if forms is affine_form:
    return forms.form(spec, tile_time, engine)
  tiling = form_lib.Tiling(tile_time=tile_time)
  found = forms.form(dispatch.Call(None, inputs, spec, tiling=tiling))
  return dataclasses.replace(found, tile_time=tile_time, engine=engine)


def engine_of(spec):
  """By kernels."""
  _, _, engine = MODULES[type(spec)]
  return engine[spec.chunked] if engine is tensor_cache.ENGINES else engine


def kernels_of(name):
  """Names of the kernels that a case is for."""
  by_chunk = "by_chunk" if name.endswith("chunk") else "outer"
  prefix = (
    "delta" if name in ("delta", "delta-ungated", "delta-before") else by_chunk
  )
  return {f"{prefix}_forward", f"{prefix}_backward"}


def run(
  engine, spec, given, ids=None, tile_time=TILE, *, gradient=True, **mode
):
  """Values, and gradients if asked for."""
  given, integers = partition(given)

  def function(*given):
    state, fresh, inputs = merge(given, integers)
    if ids is not None:
      padding = (jnp.array(ids) == 0)[..., None]
      inputs = jax.tree.map(
        lambda x: jnp.where(
          padding.reshape(*ids.shape, *[1] * (x.ndim - 2)), 0, x
        ),
        inputs,
      )
    new, outputs, _ = chunked.run(
      form(spec, engine, inputs, tile_time),
      dispatch.Call(
        state, inputs, spec, None if ids is None else jnp.array(ids), fresh
      ),
    )
    return floats(new), outputs

  with launch.interpreted(**mode):
    return gradients.value_and_gradients(function, given, gradient=gradient)


def partition(given):
  """Floats, and the integers of both states."""
  *states, inputs = given
  return (*map(floats, states), inputs), states


def floats(state):
  """The fields of a state that are differentiated."""
  return {k: v for k, v in state._asdict().items() if k in ("memory", "start")}


def merge(given, states):
  *kept, inputs = given
  states = [s._replace(**x) for s, x in zip(states, kept, strict=True)]
  return (*states, inputs)


def assert_close(actual, expected, scale=1):
  for a, b, bound, part in zip(
    actual,
    expected,
    (tolerances.VALUE["float32"], tolerances.GRADIENT["float32"]),
    ("values", "gradients"),
    strict=True,
  ):
    errors.assert_close(a, b, scale * bound, part)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_the_xla_form(name, calls):
  """Ragged, from a state inside a chunk."""
  spec, given = arguments(name, 75)
  ours = run(engine_of(spec), spec, given)
  assert calls == kernels_of(name)
  assert_close(ours, run(None, spec, given))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "delta"])
def test_tiles_of_several_blocks(name, calls):
  spec, given = arguments(name, 75)
  ours = run(engine_of(spec), spec, given, tile_time=64)
  assert calls == kernels_of(name)
  assert_close(ours, run(None, spec, given, tile_time=64))


@rotation.both_parts
@pytest.mark.parametrize("name", rotation.cases(CASES, ["delta"]))
def test_packing(name, gradient, calls):
  """Strictly: memory starts as nan, races are looked for."""
  spec, given = arguments(name, 75)
  ours = run(
    engine_of(spec),
    spec,
    given,
    IDS,
    gradient=gradient,
    **interpreter.STRICT_TPU,
  )
  forward = {x for x in kernels_of(name) if x.endswith("forward")}
  assert calls == (kernels_of(name) if gradient else forward)
  assert_close(ours, run(None, spec, given, IDS, gradient=gradient))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skip", "delta", "chunk", "after"])
def test_bfloat16_is_no_worse_than_the_xla_form(name):
  spec, given = arguments(name, 64, "bfloat16")
  truth = run(None, spec, gradients.cast(given, jnp.float32))
  xla, ours = (run(engine, spec, given) for engine in (None, engine_of(spec)))
  errors.assert_no_worse(ours, xla, truth)


def with_strong_decays(name, *dtype):
  """Decays of any strength; those of one head are mild after strong ones."""
  spec, (state, fresh, inputs) = arguments(name, 48, *dtype)
  log_decay = checks.strong_decays(40.0 * inputs.log_decay - 5.0)
  mild = inputs.log_decay[0, :, 0].at[:24].set(-200.0)
  inputs = inputs._replace(log_decay=log_decay.at[0, :, 0].set(mild))
  return spec, (state, fresh, inputs)


@pytest.mark.parametrize("name", rotation.cases(["skip", "delta"], ["skip"]))
def test_decay_of_any_range(name):
  """No factor of a decay overflows, nor does its gradient; none costs digits."""
  spec, given = with_strong_decays(name)
  ours, xla = (
    run(engine, spec, given, tile_time=32) for engine in (engine_of(spec), None)
  )
  assert_close(ours, xla)


@pytest.mark.parametrize("name", rotation.cases(["skip", "delta"], ["delta"]))
def test_decay_of_any_range_in_bfloat16(name):
  """The error is at most twice the XLA form's, also after strong decays."""
  spec, given = with_strong_decays(name, "bfloat16")
  truth, xla, ours = (
    run(engine, spec, given, tile_time=32)
    for engine, given in (
      (None, gradients.cast(given, jnp.float32)),
      (None, given),
      (engine_of(spec), given),
    )
  )
  errors.assert_no_worse(ours, xla, truth)


@pytest.mark.slow
@pytest.mark.parametrize("tile_time", [8, 24])
def test_other_tiles_go_by_other_kernels(tile_time, calls):
  spec, given = arguments("skip", 48)
  ours = run(engine_of(spec), spec, given, tile_time=tile_time)
  assert calls == {"affine_forward", "affine_backward"}
  assert_close(ours, run(prepared.ENGINE, spec, given, tile_time=tile_time))


def plans_of(spec, inputs, tile_time=TILE):
  """Plans of both kernels of the delta rule, None if they do not fit."""
  made, found = form(spec, None, inputs, tile_time), []

  def look(inputs):
    for way in ("forward", "backward"):
      found.append(engine.plan_of(delta.tokens, made, inputs, way))

  jax.eval_shape(look, inputs)
  return found


@pytest.mark.slow
def test_a_step_shrinks_until_it_fits_in_memory(calls, monkeypatch):
  spec, given = arguments("delta-ungated", 40)
  whole = plans_of(spec, given[2])
  needed = [call.needed(p, "backward", jnp.dtype("float32")) for p in whole]
  monkeypatch.setattr(launch, "LIMIT", max(needed) * 3 // 4)
  smaller = plans_of(spec, given[2])
  for a, b in zip(smaller, whole, strict=True):
    assert (a.step_units, a.step_tiles) < (b.step_units, b.step_tiles)
  ours = run(engine_of(spec), spec, given)
  assert calls == kernels_of("delta")
  assert_close(ours, run(None, spec, given))
  # What one kernel saves, no other reads: both fit, or neither runs.
  one_tile = [dataclasses.replace(p, step_units=1, step_tiles=1) for p in whole]
  least = call.needed(one_tile[0], "forward", jnp.dtype("float32"))
  monkeypatch.setattr(launch, "LIMIT", least)
  assert call.needed(one_tile[1], "backward", jnp.dtype("float32")) > least
  assert plans_of(spec, given[2]) == [None, None]


def wide(heads, key_dim, value_dim):
  """Shapes of a call of the delta rule in bfloat16."""
  memory = memories.MEMORIES["delta_rule"]
  sizes = {
    "batch": 4,
    "heads": heads,
    "key_dim": key_dim,
    "value_dim": value_dim,
  }

  def make():
    inputs = memory.make_inputs(
      jax.random.key(0), delta_api.Spec(), time=2048, **sizes
    )
    state = delta_api.init_state(delta_api.Spec(), **sizes)
    return state, gradients.cast_operands(inputs, "bfloat16")

  return dispatch.Call(*jax.eval_shape(make), delta_api.Spec())


def test_heads_as_wide_as_gated_deltanets_fit():
  call = wide(8, 256, 512)
  assert None not in plans_of(call.spec, call.inputs, tile_time=64)


def test_heads_that_are_too_wide_are_left_to_the_xla_form(monkeypatch):
  monkeypatch.setattr(dispatch, "current_platform", lambda: "tpu")
  for heads, dims, expected in (
    (1, (1024, 1024), "mosaic_tpu"),
    (1, (2048, 2048), "xla_chunked"),
  ):
    with launch.compiled("v5e"):
      call = wide(heads, *dims)
      assert delta_api.implementations.choose(None, call) == expected
  with launch.compiled("v5e"):
    reason = delta_api.implementations.unsupported("mosaic_tpu", call)
  assert "bytes of VMEM" in reason
  assert "narrower heads" in reason


@pytest.mark.slow
def test_under_shard_map(calls):
  """Rows and heads over a mesh: each device runs a kernel of its own."""
  memory, spec = memories.MEMORIES["delta_rule"], delta_api.Spec()
  sizes = {"batch": 2, "heads": 4, "key_dim": 16, "value_dim": 8}
  inputs = memory.make_inputs(jax.random.key(0), spec, time=32, **sizes)
  inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
  state, fresh = (
    memory.make_state(jax.random.key(i), spec, **sizes) for i in (1, 2)
  )
  with launch.interpreted():
    alone, over = meshes.alone_and_over_a_mesh(
      delta_api.chunk,
      (state, fresh, inputs),
      spec=spec,
      implementation="mosaic_tpu",
    )
  assert calls == kernels_of("delta")
  errors.assert_close(over, alone, tolerances.SHARDED, "sharded")
