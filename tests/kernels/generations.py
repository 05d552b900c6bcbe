"""Which generations of TPUs a kernel is compiled for."""

import pytest

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def spread(cases, slow=lambda case: False):
  """Parameters (topology, case): each case on one generation, in turn.

  On the others it is a slow test.

  Args:
    cases: what a kernel is compiled with.
    slow: case -> whether it is slow on every generation.
  """
  turn, parameters = 0, []
  for case in cases:
    for index, topology in enumerate(TOPOLOGIES):
      often = index == turn % len(TOPOLOGIES) and not slow(case)
      marks = () if often else pytest.mark.slow
      parameters.append(pytest.param(topology, case, marks=marks))
    turn += not slow(case)
  return parameters
