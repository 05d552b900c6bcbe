"""Counts the flops of a traced program.

XLA's own count (`cost_analysis`) takes each loop body once. This count walks
the jaxpr, which knows the lengths of scans.
"""

import math
from typing import Any

import jax
from jax import lax


def count(jaxpr: Any) -> int:
  """Returns the flops of all matrix products and convolutions.

  A multiply-add counts as two. The count is for all devices: the body of a
  `shard_map` is multiplied by the size of its mesh. A conditional counts as its
  most expensive branch. A loop of unknown length counts once (pages of packed
  rows: nearly always one). A Pallas kernel counts as its body times its grid.

  Args:
    jaxpr: from `jax.make_jaxpr` or `jax.jit(f).trace`.
  """
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  return sum(_of(equation) for equation in jaxpr.eqns)


def _of(equation: Any) -> int:
  name, parameters = equation.primitive.name, equation.params
  if name == "dot_general":
    return _product(equation)
  if name == "conv_general_dilated":
    return _convolution(equation)
  if name == "cond":
    return max(count(branch) for branch in parameters["branches"])
  if name == "scan":
    return parameters["length"] * count(parameters["jaxpr"])
  if name == "while":
    return count(parameters["cond_jaxpr"]) + count(parameters["body_jaxpr"])
  if name == "shard_map":
    return parameters["mesh"].size * count(parameters["jaxpr"])
  if name == "pallas_call":
    steps = math.prod(parameters["grid_mapping"].grid)
    return steps * count(parameters["jaxpr"])
  inner = (
    x
    for x in jax.tree.leaves(list(parameters.values()))
    if hasattr(getattr(x, "jaxpr", x), "eqns")
  )
  return sum(map(count, inner))


def _product(equation: Any) -> int:
  left = equation.invars[0].aval.shape
  (contracted, _), _ = equation.params["dimension_numbers"]
  outputs = math.prod(equation.outvars[0].aval.shape)
  return 2 * outputs * math.prod(left[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
  numbers: lax.ConvDimensionNumbers = equation.params["dimension_numbers"]
  kernel = equation.invars[1].aval.shape
  per_output = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
  return 2 * math.prod(equation.outvars[0].aval.shape) * per_output
