"""Gradients per token in tiles: the tile and the solver are speed."""

import functools

import jax
import programs
import pytest

from memcomp_kernels.chunking import chunked, form
from memcomp_kernels.test_time_training import tile
from memcomp_kernels.testing import (
  checks,
  errors,
  memories,
  packed_checks,
  subjects,
  tolerances,
)

MEMORY = memories.MEMORIES["test_time_training"]


def subject(name):
  return subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "tile_time"),
  [
    ("linear-token", 5),
    ("mlp-token", 7),
  ],
)
def test_any_tile_is_the_recurrence(name, tile_time):
  case = subject(name)
  chunk = functools.partial(
    programs.direct(chunked.implementation(tile.form)),
    spec=case.spec,
    tiling=form.Tiling(tile_time=tile_time),
  )
  with jax.enable_x64(True):
    arguments = case.state(), case.inputs(37)
    errors.assert_close(
      jax.jit(chunk)(*arguments)[:2],
      jax.jit(case.reference)(*arguments),
      tolerances.VALUE["float64"],
      "values",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear-token", "mlp-token"])
def test_precision(name):
  checks.check_precision(subject(name), "bfloat16", 64)


@pytest.mark.slow
def test_packed_mlp():
  packed_checks.check_packing(subject("mlp-token"), [5, 9], 1)
