"""`launch.needed`: what a TPU kernel takes of VMEM, without running it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from memcomp_kernels.pallas_tpu import launch

SHAPE = 8, 100


def double(x):
  """Twice an array, by a kernel of one step."""

  def body(refs):
    refs["y"][...] = 2 * refs["x"][...]

  spec = pl.BlockSpec(SHAPE, lambda i: (0, 0))
  found = launch.run(
    body,
    "double",
    (1,),
    {"x": x},
    {"y": launch.struct(x)},
    specs={"x": spec, "y": spec},
    scratch={},
    fix="take less",
  )
  return found["y"]


def test_measuring_a_call_does_not_change_it(monkeypatch):
  """Twice, and then run: no trace is taken for another."""
  x = jnp.ones(SHAPE)
  for _ in range(2):
    # Two buffers of each block; rows of 100 numbers take 128.
    assert launch.needed(double, x) == 2 * 2 * 8 * 128 * 4
  with launch.interpreted():
    np.testing.assert_array_equal(jax.jit(double)(x), 2 * x)
  monkeypatch.setattr(launch, "LIMIT", 2 * 2 * 8 * 128 * 4 - 1)
  with pytest.raises(NotImplementedError, match=r"VMEM.*: take less"):
    double(x)
