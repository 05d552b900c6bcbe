"""A model without its arrays, and parameters as a plain tree.

Training, checkpoints and restoring use nested dicts of arrays. The metadata of
`nnx.Param` (logical axes, weight decay) comes from an abstract model.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx

from memcomp import sharding
from memcomp.models import decoder


class Masks(NamedTuple):
  """How parameters are updated: trees of bool like the parameters.

  Attributes:
    decayed: it has weight decay.
    hidden: it is a matrix between features, not an embedding table.
    in_layers: it is such a matrix of a layer, neither embedding nor head; the
      last two axes are the matrix.
  """

  decayed: Any
  hidden: Any = None
  in_layers: Any = None


class Model(NamedTuple):
  """A model without its arrays.

  Attributes:
    graphdef: structure; `nnx.merge(graphdef, params)` is the module.
    variables: `nnx.State` of abstract `nnx.Param`s with their metadata.
    masks: each an `nnx.State` of bool like `variables`.
  """

  graphdef: Any
  variables: Any
  masks: Masks


def model_of(config: decoder.DecoderConfig) -> Model:
  """Builds a model's structure without allocating arrays."""
  graphdef, variables = jax.eval_shape(
    lambda: nnx.split(
      decoder.Decoder(config, rngs=nnx.Rngs(0), rules=sharding.RULES)
    )
  )
  decayed = jax.tree.map(
    lambda v: v.get_metadata("weight_decay", False),
    variables,
    is_leaf=_is_variable,
  )

  def only(chosen):
    return nnx.from_flat_state(
      (path, is_decayed and chosen(path))
      for path, is_decayed in nnx.to_flat_state(decayed)
    )

  hidden = only(lambda path: path != ("embedding",))
  in_layers = only(lambda path: path not in (("embedding",), ("head",)))
  return Model(graphdef, variables, Masks(decayed, hidden, in_layers))


def merge(graphdef: Any, params: Any) -> decoder.Decoder:
  """Returns the module whose parameters are `params`."""
  return nnx.merge(graphdef, params)


def params_of(model: Model, mesh: jax.sharding.Mesh) -> Any:
  """Returns the parameters as `ShapeDtypeStruct`s with their shardings.

  Raises:
    UserError: the mesh does not divide an axis, or heads.
  """
  sharding.check_divides(merge(model.graphdef, model.variables), mesh)
  return on_mesh(model.variables, mesh)


def on_mesh(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns the values of Variables as `ShapeDtypeStruct`s with shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    plain(tree),
    plain(sharding.RULES.shardings(tree, mesh)),
  )


def shardings_of(tree: Any) -> Any:
  """Returns the shardings of a tree of `ShapeDtypeStruct`s."""
  return jax.tree.map(lambda x: x.sharding, tree)


def plain(tree: Any) -> Any:
  """Returns `tree` as dicts, with each Variable replaced by its value."""
  tree = jax.tree.map(
    lambda x: x.get_value() if _is_variable(x) else x,
    tree,
    is_leaf=_is_variable,
  )
  return jax.tree.map(
    lambda x: nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x,
    tree,
    is_leaf=lambda x: isinstance(x, nnx.State),
  )


def _is_variable(x: Any) -> bool:
  return isinstance(x, nnx.Variable)
