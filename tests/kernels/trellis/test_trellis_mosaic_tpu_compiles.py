"""Trellis's TPU kernels lower and compile for TPUs, without one."""

import dataclasses
import re

import generations
import jax
import jax.numpy as jnp
import pytest

from memcomp_kernels import aot, trellis
from memcomp_kernels.pallas_tpu import launch

SHAPES = [(64, 64), (64, 128), (128, 64), (128, 128)]  # head dim, chunk
HEADS, TIME = 4, 512

needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def struct(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def arguments(spec, head_dim):
  tokens = 1, TIME, HEADS
  inputs = trellis.Inputs(
    query=struct(*tokens, head_dim),
    key=struct(*tokens, head_dim),
    value=struct(*tokens, head_dim),
    target=struct(*tokens, spec.num_slots),
    log_decay=struct(*tokens, 1, dtype=jnp.float32),
    write_rate=struct(*tokens, 1, dtype=jnp.float32),
  )
  state = jax.eval_shape(
    lambda: trellis.init_state(
      spec, batch=1, heads=HEADS, key_dim=head_dim, value_dim=head_dim
    )
  )
  return state, inputs


def gradient(spec, *, fresh=False, **keywords):
  """Forward and backward of all inputs and memories.

  A fresh state's zero position is known: whole chunks follow, and the kernels
  for chunks that began before are left out.
  """

  def function(state, inputs):
    def objective(memories, inputs):
      filled = state._replace(key_memory=memories[0], value_memory=memories[1])
      if fresh:
        filled = filled._replace(position=jnp.zeros(1, jnp.int32))
      _, y = trellis.chunk(
        filled, inputs, spec=spec, implementation="mosaic_tpu", **keywords
      )
      return jnp.sum(jnp.square(y.astype(jnp.float32)))

    memories = state.key_memory, state.value_memory
    return jax.grad(objective, argnums=(0, 1))(memories, inputs)

  return function


@pytest.mark.parametrize(
  ("head_dim", "chunk"),
  [
    pytest.param(*shape, marks=[pytest.mark.slow] * (shape != (64, 64)))
    for shape in [*SHAPES, (64, 16)]
  ],
)
def test_lowers(head_dim, chunk):
  spec = trellis.Spec(chunk_size=chunk)
  # Kernels count in 32 bits, also where the program has 64.
  with launch.compiled(), jax.enable_x64(True):
    exported = jax.export.export(jax.jit(gradient(spec)), platforms=["tpu"])(
      *arguments(spec, head_dim)
    )
  text = exported.mlir_module()
  for name in ("trellis_forward", "trellis_backward"):
    # Separable and safe; for whole chunks, and for those that began before.
    assert text.count(f'kernel_name = "{name}"') == 4, name


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
  ("topology", "case"),
  generations.spread(
    [(*shape, decay) for shape in SHAPES for decay in ("separable", "safe")],
    # Every dimension, chunk and form with two of the others.
    slow=lambda case: (case[0] == case[1]) != (case[2] == "separable"),
  ),
  ids=str,
)
def test_compiles(topology, case):
  head_dim, chunk, decay = case
  spec = trellis.Spec(chunk_size=chunk)
  tiling = trellis.Tiling(decay=decay)
  with launch.compiled():
    compiled = aot.compile_for(
      topology,
      gradient(spec, fresh=True, tiling=tiling),
      *arguments(spec, head_dim),
    )
  for name in ("trellis_forward", "trellis_backward"):
    assert name in compiled.as_text(), name


@pytest.mark.aot
@needs_compiler
def test_compiles_from_any_position():
  spec = trellis.Spec(chunk_size=64)
  with launch.compiled():
    compiled = aot.compile_for(
      "v5e:2x2",
      gradient(spec, tiling=trellis.Tiling(decay="safe")),
      *arguments(spec, 64),
    )
  for name in ("trellis_forward", "trellis_backward"):
    assert name in compiled.as_text(), name


TOKEN = trellis.Spec(gradient_at="token")


@pytest.mark.slow
def test_per_token_lowers():
  with launch.compiled(), jax.enable_x64(True):
    exported = jax.export.export(jax.jit(gradient(TOKEN)), platforms=["tpu"])(
      *arguments(TOKEN, 64)
    )
  text = exported.mlir_module()
  for name in ("trellis_forward", "trellis_backward"):
    assert text.count(f'kernel_name = "{name}"') == 1, name


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
  ("topology", "head_dim"),
  generations.spread([64, 128], slow=lambda dim: dim == 64),
)
def test_per_token_compiles(topology, head_dim):
  with launch.compiled():
    compiled = aot.compile_for(
      topology, gradient(TOKEN), *arguments(TOKEN, head_dim)
    )
  for name in ("trellis_forward", "trellis_backward"):
    assert name in compiled.as_text(), name


@pytest.mark.aot
@needs_compiler
def test_no_copies_around_the_kernel():
  """What projections emit is what the kernel reads, and so behind it."""
  spec = dataclasses.replace(trellis.Spec(), chunk_size=64)
  dim, d_model = 64, 256
  state, _ = arguments(spec, dim)
  x = struct(1, TIME, d_model)
  weights = {
    name: struct(d_model, HEADS * dim)
    for name in ("query", "key", "value", "target")
  } | {
    "log_decay": struct(d_model, HEADS),
    "write_rate": struct(d_model, HEADS),
    "output": struct(HEADS * dim, d_model),
  }

  def layer(state, x, weights):
    def project(name):
      return jnp.reshape(x @ weights[name], (1, TIME, HEADS, -1))

    log_decay = jax.nn.log_sigmoid(project("log_decay").astype(jnp.float32))
    rate = jax.nn.sigmoid(project("write_rate").astype(jnp.float32))
    inputs = trellis.Inputs(
      *(project(name) for name in ("query", "key", "value", "target")),
      log_decay,
      rate,
    )
    state, y = trellis.chunk(
      # Whole chunks, as above.
      state._replace(position=jnp.zeros(1, jnp.int32)),
      inputs,
      spec=spec,
      implementation="mosaic_tpu",
      tiling=trellis.Tiling(decay="separable"),
    )
    return jnp.reshape(y, (1, TIME, -1)) @ weights["output"]

  with launch.compiled():
    text = aot.compile_for("v5e:2x2", layer, state, x, weights).as_text()
  large = TIME * HEADS * dim
  copies = [
    line.strip()[:120]
    for line in text.splitlines()
    if (found := re.search(r"= \w+\[([\d,]+)\]\S* (copy|transpose)\(", line))
    and _size(found[1]) >= large
  ]
  assert not copies, copies


def _size(dims):
  size = 1
  for dim in dims.split(","):
    size *= int(dim)
  return size
