"""Gradients per token in tiles: the tile and the solver are speed."""

import pytest

from memcomp_kernels.testing import (
  checks,
  memories,
  packed_checks,
  subjects,
)

MEMORY = memories.MEMORIES["test_time_training"]


def subject(name):
  return subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear-token", "mlp-token"])
def test_precision(name):
  checks.check_precision(subject(name), "bfloat16", 64)


@pytest.mark.slow
def test_packed_mlp():
  packed_checks.check_packing(subject("mlp-token"), [5, 9], 1)
