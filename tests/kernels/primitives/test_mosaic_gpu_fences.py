"""GPU kernels commit what products and copies take from shared memory."""

import fences
import jax
import jax.numpy as jnp
import pytest
import rotation
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.pallas_gpu import tile_kernel
from memcomp_kernels.testing import gradients, memories

CASES = {
  "delta_rule": {},
  "state_space_duality": {},
  "tensor_cache": {"window_size": 8, "chunk_size": 8, "rule": "delta"},
  "trellis": {"num_slots": 64, "chunk_size": 64},
  "trellis-16": {"num_slots": 64, "chunk_size": 16},
  "trellis-token": {"num_slots": 64, "gradient_at": "token"},
  "lattice": {"num_slots": 64, "chunk_size": 64},
  "lattice-encoding": {"num_slots": 64, "objective": "encoding"},
}


def program(case, packed=False, time=130):
  """Forward and backward, of whole segments or packed ones; arguments."""
  memory = memories.MEMORIES[case.partition("-")[0]]
  spec = memory.op.Spec(**CASES[case])
  sizes = {"batch": 1, "heads": 2, "key_dim": 64, "value_dim": 64}
  inputs = memory.make_inputs(jax.random.key(0), spec, time=time, **sizes)
  state = memory.make_state(jax.random.key(1), spec, **sizes)
  ids = jnp.ones((1, time), jnp.int32).at[:, 70:].set(2) if packed else None

  def run(state, inputs):
    named = {
      "implementation": "mosaic_gpu",
      "segment_ids": ids,
      "max_position": 0,
    }
    return memory.op.chunk(state, inputs, spec=spec, **named)

  def both(*given):
    return gradients.value_and_gradients(run, given)

  return both, state, gradients.cast_operands(inputs, "bfloat16")


def missing(*case, **kwargs):
  with tile_kernel.lowered():
    return fences.missing(*program(*case, **kwargs))


@pytest.mark.parametrize(
  "packed",
  rotation.cases([False, True], [False]),
  ids=["whole", "packed"],
)
@pytest.mark.parametrize("case", CASES)
def test_none_is_missing(case, packed):
  assert not missing(case, packed)


@pytest.mark.parametrize("case", rotation.cases(CASES, ["state_space_duality"]))
def test_programs_whose_numbers_have_64_bits(case):
  function, *given = program(case)
  with jax.enable_x64(True), tile_kernel.lowered():
    traced = jax.jit(function).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" in text


def test_missing_ones_are_found(monkeypatch):
  monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
  found = missing("delta_rule", time=131)  # nothing traced before is this long
  assert {name.split()[0] for name in found} == {
    "wgmma_ref",
    "copy_smem_to_gmem",
  }


def test_a_fence_in_one_branch_is_none():
  def kernel(x, out, shared):
    shared[...] = x[...]
    jax.lax.cond(x[0] > 0, plgpu.commit_smem, lambda: None)
    plgpu.copy_smem_to_gmem(shared, out)
    plgpu.wait_smem_to_gmem(0)

  def call(x):
    return plgpu.kernel(
      kernel, out_type=x, scratch_types=[plgpu.SMEM(x.shape, x.dtype)]
    )(x)

  walk = fences._Walk()
  walk.run(jax.make_jaxpr(call)(jnp.zeros(128)).jaxpr, {})
  assert len(walk.found) == 1 and walk.found[0].startswith("copy_smem_to_gmem")


def test_without_kernels_it_says_so():
  with pytest.raises(ValueError, match="no kernel"):
    fences.missing(jnp.sin, 1.0)
