"""The step with the real model; the rest is tested with a lighter one."""

import jax
import numpy as np
import pytest
import training_cases

from memcomp import sharding
from memcomp.data import batch as batch_lib
from memcomp.training import state, step
from memcomp_kernels import trellis


def _batch(seed):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 250, (4, 17)).astype(np.int32)
  targets = tokens[:, 1:].copy()
  targets[0, 3:] = -1
  segments = np.ones((4, 16), np.int32)
  segments[1, 5:] = 2
  positions = np.tile(np.arange(16, dtype=np.int32), (4, 1))
  positions[1, 5:] -= 5
  return batch_lib.Batch(tokens[:, :-1], targets, segments, positions)


def _run(config, **mesh_sizes):
  for name, size in mesh_sizes.items():
    setattr(config.mesh, name, size)
  mesh = sharding.make_mesh(config.mesh)
  train_step = jax.jit(step.make_train_step(config))
  current, found = state.initial_state(config, mesh), []
  rows = sharding.batch_sharding(mesh)
  with jax.set_mesh(mesh):
    for number in range(3):
      batch = jax.device_put(_batch(number), rows)
      current, metrics = train_step(current, batch)
      found.append(jax.device_get(metrics))
  return current, found


@pytest.mark.slow
def test_accumulation_and_mesh_change_nothing_but_rounding():
  config = training_cases.tiny(carry_state=True)
  config.data.packing = "stream"
  _, plain = _run(config)
  config.training.accumulation = 2
  after, parts = _run(config, replica=1, fsdp=2, tensor=2)
  spread = {len(x.sharding.device_set) for x in jax.tree.leaves(after)}
  assert spread == {4}
  table = after.params["embedding"]
  assert table.addressable_shards[0].data.size == table.size // 4
  for a, b in zip(plain, parts, strict=True):
    np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-5)
    np.testing.assert_allclose(b["memory_norms"], a["memory_norms"], rtol=1e-4)
    assert b["tokens"] == a["tokens"]
  norms = [
    float(np.abs(x).max()) for x in jax.tree.leaves(after.opt_state[1].mu)
  ]
  assert min(norms) > 0, "a parameter has no gradient"


@pytest.mark.slow
def test_another_implementation(monkeypatch):
  """The token scan, by name; the loss is the same but for rounding."""
  config = training_cases.tiny()
  _, plain = _run(config)
  calls, function = [], trellis.implementations.functions["reference"]

  def counted(*args, **kwargs):
    calls.append(1)
    return function(*args, **kwargs)

  monkeypatch.setitem(trellis.implementations.functions, "reference", counted)
  config.training.implementation = "reference"
  _, scanned = _run(config)
  assert calls
  for a, b in zip(plain, scanned, strict=True):
    np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-5)
