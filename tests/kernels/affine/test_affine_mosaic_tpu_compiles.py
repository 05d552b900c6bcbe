"""Kernels of affine tiles lower and compile for TPUs, without one."""

import generations
import jax
import jax.numpy as jnp
import programs
import pytest

from memcomp_kernels import aot
from memcomp_kernels.chunking import form
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import memories

SPECS = {"delta_rule": "gated", "state_space_duality": "shared"}
CASES = [  # key dim, value dim, tile
  # Tiles that kernels over tokens do not take.
  ("delta_rule", 64, 64, 24),
  ("delta_rule", 128, 128, 48),
  ("state_space_duality", 128, 64, 24),
]
HEADS, TIME = 4, 512

needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def gradient(name, key_dim, value_dim, tile_time):
  """Forward and backward, and shapes of its arguments."""
  memory = memories.MEMORIES[name]
  spec = memory.specs[SPECS[name]]
  chunk = programs.direct(memory.op.implementations.functions["mosaic_tpu"])
  sizes = {
    "batch": 1,
    "heads": HEADS,
    "key_dim": key_dim,
    "value_dim": value_dim,
  }
  key = jax.random.key(0)
  state, inputs = jax.eval_shape(
    lambda: (
      memory.make_state(key, spec, **sizes),
      memory.make_inputs(key, spec, time=TIME, **sizes),
    )
  )
  low = {
    field: jax.ShapeDtypeStruct(getattr(inputs, field).shape, jnp.bfloat16)
    for field in ("query", "key", "value")
  }

  def function(state, inputs):
    def objective(memory, inputs):
      _, y = chunk(
        state._replace(memory=memory),
        inputs,
        spec=spec,
        tiling=form.Tiling(tile_time=tile_time),
      )
      return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(objective, argnums=(0, 1))(state.memory, inputs)

  return function, (state, inputs._replace(**low))


@pytest.mark.parametrize(
  "case",
  [CASES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in CASES[1:])],
  ids=str,
)
def test_lowers(case):
  function, arguments = gradient(*case)
  with launch.compiled():
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(
      *arguments
    )
  text = exported.mlir_module()
  for name in ("affine_forward", "affine_backward"):
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
  for name in ("affine_forward", "affine_backward"):
    assert name in compiled.as_text(), name
