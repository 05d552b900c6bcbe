"""Gradients per token in tiles: the tile and the solver are speed."""

import functools

import jax
import programs
import pytest

from memcomp_kernels.chunking import chunked
from memcomp_kernels.math import solver
from memcomp_kernels.test_time_training import tile, tilings
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


@pytest.mark.parametrize(
  ("name", "tiling"),
  [
    ("linear-token", tilings.Tiling(tile_time=5)),
    (
      "linear-token",
      tilings.Tiling(
        tile_time=32,
        solver=solver.Solver(method="sweeps", block_time=8),
      ),
    ),
    ("mlp-token", tilings.Tiling(tile_time=7)),
  ],
  ids=["linear-5", "linear-sweeps", "mlp-7"],
)
def test_any_tile_is_the_recurrence(name, tiling):
  case = subject(name)
  chunk = functools.partial(
    programs.direct(chunked.implementation(tile.form)),
    spec=case.spec,
    tiling=tiling,
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


def test_tiling_names_the_field():
  with pytest.raises(ValueError, match="tile_time=0"):
    tilings.Tiling(tile_time=0)
