"""Splash attention as it is called here compiles for TPUs, without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memcomp_kernels import aot, softmax_attention
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.parallel import shard

BATCH, HEADS, KV_HEADS = 2, 8, 4
NAMES = ("splash_mha_fwd", "splash_mha_dkv", "splash_mha_dq")

needs_compiler = pytest.mark.skipif(
  not aot.available(), reason="needs the extra aot"
)


def gradient(spec, dim, time, chunk, **keywords):
  """Final state, and the gradient of all inputs, from a fresh state."""

  def function(inputs, segment_ids):
    state = softmax_attention.init_state(
      spec,
      batch=BATCH,
      heads=KV_HEADS,
      key_dim=dim,
      value_dim=dim,
      length=time,
    )

    def objective(inputs):
      final, y = chunk(
        state,
        inputs,
        spec=spec,
        segment_ids=segment_ids,
        max_position=0,
        **keywords,
      )
      return jnp.sum(jnp.square(y.astype(jnp.float32))), final

    return jax.grad(objective, has_aux=True)(inputs)

  return function


def arguments(dim, time, dtype, packed, mesh=None):
  def struct(*shape, dtype=dtype, spec=()):
    placed = None if mesh is None else NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

  def tokens(heads):
    return struct(BATCH, time, heads, dim, spec=("fsdp", None, "tensor"))

  inputs = softmax_attention.Inputs(
    tokens(HEADS), tokens(KV_HEADS), tokens(KV_HEADS)
  )
  ids = struct(BATCH, time, dtype=jnp.int32, spec=("fsdp",))
  return inputs, ids if packed else None


FULL = softmax_attention.Spec()
WINDOW = softmax_attention.Spec(window_size=1024)
SINKS = softmax_attention.Spec(window_size=1024, sink_tokens=4)
BLOCKS = softmax_attention.Spec(window_size=768, chunk_size=384)


def test_lowers():
  # Kernels count in 32 bits, also where the program has 64.
  with launch.compiled(), jax.enable_x64(True):
    function = gradient(
      FULL, 64, 300, softmax_attention.chunk, implementation="library_tpu"
    )
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(
      *arguments(64, 300, jnp.bfloat16, packed=True)
    )
  text = exported.mlir_module()
  for name in NAMES:
    assert text.count(f'kernel_name = "{name}_segmented') == 1, name


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
  ("topology", "dim", "time", "spec", "dtype", "packed"),
  [
    ("v5e:2x2", 64, 2048, FULL, "bfloat16", True),
    ("v5e:2x2", 128, 2048, SINKS, "float32", False),
    ("v5e:2x2", 64, 8192, BLOCKS, "bfloat16", False),
    ("v5e:2x2", 128, 8192, WINDOW, "bfloat16", True),
    ("v6e:2x2", 64, 2048, WINDOW, "bfloat16", True),
    ("v6e:2x2", 128, 2048, BLOCKS, "float32", False),
    ("v6e:2x2", 64, 8192, SINKS, "bfloat16", False),
    pytest.param(
      *("v6e:2x2", 128, 8192, FULL, "bfloat16", True), marks=pytest.mark.slow
    ),
    ("v5e:2x2", 256, 640, FULL, "float32", True),
  ],
)
def test_compiles_over_rows_and_heads(topology, dim, time, spec, dtype, packed):
  """The platform's choice, without a name; no device asks another."""
  devices = np.array(aot.devices(topology)).reshape(2, 2)
  mesh = Mesh(devices, ("fsdp", "tensor"))
  chunk = shard.shard_chunk(
    softmax_attention.chunk, batch_axes=("fsdp",), head_axes=("tensor",)
  )
  given = arguments(dim, time, dtype, packed, mesh)
  with jax.set_mesh(mesh):
    function = gradient(spec, dim, time, chunk)
    text = jax.jit(function).lower(*given).compile().as_text()
  for name in NAMES:
    assert name in text, name
  for collective in ("all-gather", "all-reduce", "all-to-all"):
    assert collective not in text
