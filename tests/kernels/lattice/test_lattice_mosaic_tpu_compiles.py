"""Lattice's TPU kernels lower and compile for TPUs, without one."""

import itertools

import generations
import jax
import jax.numpy as jnp
import pytest
import rotation

from memcomp_kernels import aot, lattice
from memcomp_kernels.pallas_tpu import launch

SPECS = {
  "token": lattice.Spec(gradient_at="token"),
  "chunk_start": lattice.Spec(chunk_size=16),
  "64": lattice.Spec(chunk_size=64),
  "128": lattice.Spec(chunk_size=128),
  "orthogonal": lattice.Spec(chunk_size=16, update="orthogonal"),
}
HEADS, TIME = 4, 256

needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def kernels(meaning):
  """Names, both ways."""
  by_chunk = meaning not in ("token", "orthogonal")
  prefix = "lattice_chunk" if by_chunk else "lattice"
  return f"{prefix}_forward", f"{prefix}_backward"


def gradient(meaning, head_dim, *, fresh=False):
  """Forward and backward, and shapes of its arguments.

  With a fresh state whole chunks follow, and the kernels for chunks that began
  before are left out.
  """
  spec = SPECS[meaning]

  def struct(width, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((1, TIME, HEADS, width), dtype)

  inputs = lattice.Inputs(
    query=struct(spec.num_slots),
    key=struct(spec.num_slots),
    value=struct(head_dim),
    log_decay=struct(1, jnp.float32),
    write_rate=struct(1, jnp.float32),
  )
  state = jax.eval_shape(
    lambda: lattice.init_state(spec, batch=1, heads=HEADS, value_dim=head_dim)
  )

  def function(state, inputs):
    def objective(memory, inputs):
      filled = state._replace(memory=memory)
      if fresh and spec.chunked:
        filled = filled._replace(position=jnp.zeros(1, jnp.int32))
      _, y = lattice.chunk(
        filled, inputs, spec=spec, implementation="mosaic_tpu"
      )
      return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(objective, argnums=(0, 1))(state.memory, inputs)

  return function, (state, inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("meaning", "count"),
  rotation.cases(
    [("token", 1), ("chunk_start", 2), ("orthogonal", 2)],
    [("chunk_start", 2)],
  ),
)
def test_lowers(meaning, count):
  """With chunks, for whole ones and for those that began before."""
  function, arguments = gradient(meaning, 64)
  # Kernels count in 32 bits, also where the program has 64.
  with launch.compiled(), jax.enable_x64(True):
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(
      *arguments
    )
  text = exported.mlir_module()
  for name in kernels(meaning):
    assert text.count(f'kernel_name = "{name}"') == count, name


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
  ("topology", "case"),
  generations.spread(
    list(itertools.product(SPECS, [64, 128])),
    slow=lambda case: case == ("chunk_start", 128),
  ),
  ids=str,
)
def test_compiles(topology, case):
  meaning, head_dim = case
  # Those of any position once: of v6e's narrow heads.
  fresh = (topology, head_dim) != ("v6e:2x2", 64)
  function, arguments = gradient(meaning, head_dim, fresh=fresh)
  with launch.compiled():
    compiled = aot.compile_for(topology, function, *arguments)
  for name in kernels(meaning):
    assert name in compiled.as_text(), name
