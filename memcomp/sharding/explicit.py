"""Runs modules whose arrays carry Explicit mesh axes in their types.

Inside, axes are Auto, so that no layer has to be written for sharding in types;
what comes out has the types that it is said to have.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from memcomp.sharding import axes


def call(
  module: Any,
  method: Callable[..., Any],
  *arrays: Any,
  names: tuple[str, ...],
  like: Callable[[], Any],
  heads: int | None = None,
) -> Any:
  """Returns `method(module, *arrays)`, with Auto axes where a mesh is Explicit.

  Args:
    module: has `rules`. Where they are `axes.NONE` and the mesh is Explicit,
      the types of the arrays are its rules, see `axes.of_types`.
    method: of the module's class.
    arrays: pytrees of arrays.
    names: logical names of the first axes of the first array.
    like: returns arrays laid as the results are to be, in their structure.
      Axes that a result has beyond them are whole.
    heads: see `axes.of_types`.
  """
  params = nnx.state(module)
  mesh = _explicit_mesh((arrays, params))
  if mesh is None:
    return method(module, *arrays)
  rules = module.rules
  if rules == axes.NONE:
    rules = axes.of_types(mesh, arrays[0], names, params, heads)
  # Parameters are arguments: what a function closes over keeps Explicit types.
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


def _explicit_mesh(tree: Any) -> Any:
  """The mesh with Explicit axes that is in use or that arrays have, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  if AxisType.Explicit in mesh.axis_types:
    return mesh
  for leaf in jax.tree.leaves(tree):
    mesh = jax.typeof(leaf).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
      return mesh
  return None
