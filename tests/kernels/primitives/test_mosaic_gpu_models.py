"""Training steps of models by the GPU kernels, lowered for `cuda`."""

import itertools
import re

import jax
import pytest

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.models import presets
from memcomp.training import feed, step
from memcomp.training import state as state_lib
from memcomp_kernels import dispatch
from memcomp_kernels.pallas_gpu import tile_kernel

AFFINE = {
  "affine_writes",
  "affine_writes_backward",
  "affine_reads_backward",
}
KERNELS = {
  "trellis": {
    "trellis_writes",
    "trellis_reads",
    "trellis_reads_backward",
    "trellis_writes_backward",
  },
  "lattice": {"lattice_forward", "lattice_backward"},
  "tensor_cache": AFFINE,
  "delta_net": AFFINE,
  "mamba2": AFFINE,
}
"""Of models of the papers' sizes."""


def one_layer(
  name: str, packing: str, implementation: str = "mosaic_gpu"
) -> config_lib.Config:
  config = config_lib.Config(name=name)
  config.model = presets.language_model(f"{name}-125m")
  config.model.num_layers, config.model.vocab_size = 1, 256
  config.data.packing, config.data.sequence_length = packing, 128
  config.training.batch_size = 2
  config.training.implementation = implementation
  return config


def lowered(config: config_lib.Config) -> set[str]:
  """The GPU kernels of a training step."""
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  with jax.set_mesh(mesh), tile_kernel.lowered():
    state = state_lib.abstract_state(config, mesh)
    batch = feed.abstract_batch(config, mesh)
    traced = step.jitted(config, mesh).trace(state, batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  return set(re.findall(r"00([a-z]+_[a-z_]+)_mosaic_gpu\b", text))


SLOW = {
  (name, packing)
  for name, packing in itertools.product(KERNELS, ("joined", "concat"))
  if packing == "concat" or name != "mamba2"
}


@pytest.mark.parametrize(
  "name, packing",
  [
    pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW))
    for case in itertools.product(KERNELS, ("joined", "concat"))
  ],
)
def test_training_steps_use_the_kernels(name, packing):
  assert lowered(one_layer(name, packing)) == KERNELS[name]


def test_they_are_the_default(monkeypatch):
  monkeypatch.setattr(dispatch, "current_platform", lambda: "gpu")
  assert lowered(one_layer("mamba2", "joined", "")) == KERNELS["mamba2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trellis", "lattice"])
def test_solvers_are_the_xla_forms(name):
  """A layer that asks for one does not get a kernel that has none."""
  config = one_layer(name, "joined")
  config.model.mixers["memory"].solver.method = "sweeps"
  assert not lowered(config)


def test_no_such_implementation():
  said = pytest.raises(NotImplementedError, match="'mosaic' is unknown")
  with said, dispatch.default_implementation("mosaic"):
    pass
