"""Kernels that read tokens where they lie lower and compile for TPUs."""

import re

import generations
import jax
import jax.numpy as jnp
import programs
import pytest

from memcomp_kernels import aot, state_space_duality
from memcomp_kernels import delta_rule as delta_api
from memcomp_kernels.chunking import form
from memcomp_kernels.pallas_tpu import launch

# Kernel, heads that share a key, key dim, value dim, tile, dtype if not bfloat16.
CASES = [
  ("outer", 1, 64, 64, 64),
  ("outer", 4, 128, 64, 64),
  ("outer", 1, 128, 128, 128),
  ("delta", 1, 64, 64, 64),
  ("delta", 1, 128, 128, 64),
  ("delta", 1, 128, 128, 128),
  ("outer", 1, 64, 64, 64, "float32"),
]
HEADS, TIME = 4, 512

needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def struct(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def kernels(name):
  return f"{name}_forward", f"{name}_backward"


def gradient(name, shared, key_dim, value_dim, tile_time, dtype="bfloat16"):
  """Forward and backward, and shapes of its arguments."""
  if name == "delta":
    spec, module = delta_api.Spec(), delta_api
  else:
    spec, module = (
      state_space_duality.Spec(heads_per_group=shared),
      state_space_duality,
    )
  chunk = programs.direct(module.implementations.functions["mosaic_tpu"])
  tiling = form.Tiling(tile_time=tile_time)
  keys, gates = (1, TIME, HEADS // shared, key_dim), (1, TIME, HEADS, 1)
  gates = [struct(*gates, dtype=jnp.float32)] * (2 if name == "delta" else 3)
  arrays = keys, keys, (1, TIME, HEADS, value_dim)
  inputs = module.Inputs(*(struct(*x, dtype=dtype) for x in arrays), *gates)
  memory = struct(1, HEADS, key_dim, value_dim, dtype=jnp.float32)

  def function(memory, inputs):
    def objective(memory, inputs):
      state = module.State(memory, jnp.zeros(1, jnp.int32))
      _, y = chunk(state, inputs, spec=spec, tiling=tiling)
      return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(objective, argnums=(0, 1))(memory, inputs)

  return function, (memory, inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=[pytest.mark.slow] * (case[1:] != (1, 64, 64, 64)))
    for case in CASES
  ],
  ids=str,
)
def test_lowers(case):
  function, arguments = gradient(*case)
  with launch.compiled():
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(
      *arguments
    )
  text = exported.mlir_module()
  for name in kernels(case[0]):
    assert text.count(f'kernel_name = "{name}"') == 1, name


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
  ("topology", "case"), generations.spread(CASES), ids=str
)
def test_compiles(topology, case):
  function, arguments = gradient(*case)
  with launch.compiled():
    compiled = aot.compile_for(topology, function, *arguments)
  for name in kernels(case[0]):
    assert name in compiled.as_text(), name


@pytest.mark.aot
@needs_compiler
def test_no_copies_around_the_kernels():
  """What projections emit is what kernels read, both ways."""
  spec, dim, d_model = state_space_duality.Spec(skip=False), 64, 256
  x = struct(1, TIME, d_model)
  weights = {
    name: struct(d_model, HEADS * dim) for name in ("query", "key", "value")
  } | {
    "log_decay": struct(d_model, HEADS),
    "write_rate": struct(d_model, HEADS),
    "output": struct(HEADS * dim, d_model),
  }

  def layer(x, weights):
    def project(name):
      return jnp.reshape(x @ weights[name], (1, TIME, HEADS, -1))

    inputs = state_space_duality.Inputs(
      *(project(name) for name in ("query", "key", "value")),
      jax.nn.log_sigmoid(project("log_decay").astype(jnp.float32)),
      jax.nn.sigmoid(project("write_rate").astype(jnp.float32)),
    )
    state = state_space_duality.init_state(
      spec, batch=1, heads=HEADS, key_dim=dim, value_dim=dim
    )
    _, y = state_space_duality.chunk(
      state, inputs, spec=spec, implementation="mosaic_tpu"
    )
    return jnp.reshape(y, (1, TIME, -1)) @ weights["output"]

  def objective(x, weights):
    return jnp.sum(jnp.square(layer(x, weights).astype(jnp.float32)))

  gradients = jax.grad(objective, argnums=(0, 1))
  with launch.compiled():
    text = aot.compile_for("v5e:2x2", gradients, x, weights).as_text()
  assert all(name in text for name in kernels("outer"))
  copies = [
    line.strip()[:120]
    for line in text.splitlines()
    if (found := re.search(r"= \w+\[([\d,]+)\]\S* (copy|transpose)\(", line))
    and _size(found[1]) >= TIME * HEADS * dim
  ]
  assert not copies, copies


def _size(dims):
  size = 1
  for dim in dims.split(","):
    size *= int(dim)
  return size
