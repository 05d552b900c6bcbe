"""Runs modules on arrays whose types carry Explicit mesh axes.

The module runs with Auto axes, so layers need not support sharding in types.
The results have the stated types.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from memcomp.sharding import axes
from memcomp_kernels import contract


@contract.default_promotion()
def call(
  module: Any,
  method: Callable[..., Any],
  *arrays: Any,
  names: tuple[str, ...],
  like: Callable[[], Any],
  heads: int | None = None,
) -> Any:
  """Returns `method(module, *arrays)`, with Auto axes if a mesh is Explicit.

  Restrictions of dtype and rank promotion do not apply inside, either.

  Args:
    module: module with `rules`. If they are `axes.NONE` and the mesh is
      Explicit, the types of the arrays determine the rules, see
      `axes.rules_of_types`.
    method: function of the module's class.
    *arrays: pytrees of arrays.
    names: logical names of the first axes of the first array.
    like: returns arrays in the structure and with the sharding of the results.
      Further axes of a result are not sharded.
    heads: see `axes.rules_of_types`.
  """
  params, arrays = nnx.state(module), as_jax(arrays)
  mesh = _explicit_mesh((arrays, params))
  if mesh is None:
    return method(module, *arrays)
  rules = module.rules
  if rules == axes.NONE:
    rules = axes.rules_of_types(mesh, arrays[0], names, params, heads)
  # Parameters must be arguments: closed-over arrays keep Explicit types.
  graphdef, params = nnx.split(module)

  def run(params, arrays):
    inner = nnx.merge(graphdef, params)
    axes.use(inner, rules)
    return method(inner, *arrays)

  def laid(leaf):
    return NamedSharding(mesh, jax.typeof(leaf).sharding.spec)

  out = jax.tree.map(laid, like())
  inner: Any = jax.sharding.auto_axes(run, out_sharding=out)
  return inner(params, arrays)


def as_jax(arrays: Any) -> Any:
  """Returns NumPy's floats in JAX's dtype: float64 is float32 without x64."""

  def one(x):
    is_float = isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)
    return jnp.asarray(x) if is_float else x

  return jax.tree.map(one, arrays)


def _explicit_mesh(tree: Any) -> Any:
  """The Explicit mesh that is in use or in the arrays' types, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  if AxisType.Explicit in mesh.axis_types:
    return mesh
  for leaf in jax.tree.leaves(tree):
    mesh = jax.typeof(leaf).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
      return mesh
  return None
