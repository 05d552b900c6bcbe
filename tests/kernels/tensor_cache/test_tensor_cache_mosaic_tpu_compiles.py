"""Tensor Cache's kernels lower and compile for TPUs, without one."""

import generations
import jax
import jax.numpy as jnp
import programs
import pytest

from memcomp_kernels import aot, tensor_cache
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import memories

MEMORY = memories.MEMORIES["tensor_cache"]
KERNELS = MEMORY.op.implementations.functions["mosaic_tpu"]
WINDOW = 128
SPECS = {
  "outer": tensor_cache.Spec(window_size=WINDOW),
  "delta": tensor_cache.Spec(window_size=WINDOW, rule="delta"),
  "evicted-slots": tensor_cache.Spec(
    window_size=WINDOW, write_population="evicted", num_slots=2
  ),
}
CASES = [("outer", 64), ("delta", 128), ("evicted-slots", 64)]
HEADS, TIME = 4, 512
SPLASH = "splash_mha_fwd", "splash_mha_dkv", "splash_mha_dq"


def kernels(name):
  prefix = "affine" if name == "evicted-slots" else "by_chunk"
  return f"{prefix}_forward", f"{prefix}_backward", *SPLASH


needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def gradient(name, dim):
  """Forward and backward from a fresh state, and shapes of its arguments."""
  spec = SPECS[name]
  sizes = {"batch": 1, "heads": HEADS, "key_dim": dim, "value_dim": dim}
  inputs = jax.eval_shape(
    lambda: MEMORY.make_inputs(jax.random.key(0), spec, time=TIME, **sizes)
  )
  low = {
    field: jax.ShapeDtypeStruct(getattr(inputs, field).shape, jnp.bfloat16)
    for field in ("query", "key", "value")
  }

  def function(inputs):
    def objective(inputs):
      state = tensor_cache.init_state(spec, **sizes)
      _, y = programs.direct(KERNELS)(state, inputs, spec=spec, max_position=0)
      return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(objective)(inputs)

  return function, (inputs._replace(**low),)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [pytest.param(CASES[0], marks=pytest.mark.slow), *CASES[1:]],
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
    assert f'kernel_name = "{name}' in text, name


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
  ("topology", "case"), generations.spread(CASES), ids=str
)
def test_compiles(topology, case):
  function, arguments = gradient(*case)
  with launch.compiled():
    compiled = aot.compile_for(topology, function, *arguments)
  text = compiled.as_text()
  for name in kernels(case[0]):
    assert name in text, name


def test_a_block_that_cannot_fit_says_so():
  spec = tensor_cache.Spec(window_size=4096, chunk_size=4096)
  sizes = {"batch": 1, "heads": 1, "key_dim": 1024, "value_dim": 1024}
  state, inputs = jax.eval_shape(
    lambda: (
      tensor_cache.init_state(spec, **sizes),
      MEMORY.make_inputs(jax.random.key(0), spec, time=4096, **sizes),
    )
  )
  with (
    launch.compiled(),
    pytest.raises(NotImplementedError, match="bytes of VMEM, more than"),
  ):
    jax.eval_shape(
      lambda state, inputs: programs.direct(KERNELS)(state, inputs, spec=spec),
      state,
      inputs,
    )
