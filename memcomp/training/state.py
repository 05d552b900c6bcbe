"""The training state: a plain tree of arrays, and where it lies on a mesh.

The module tree is split once. What is trained, saved and restored afterwards
are nested dicts of arrays; the metadata of `nnx.Param` (logical axes, weight
decay) is read off an abstract model whenever it is needed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.models import decoder
from memcomp.training import optimizer


class TrainState(NamedTuple):
  """Everything that one step hands to the next.

  Attributes:
    params: nested dict of float32 arrays.
    opt_state: of optax, moments sharded as the parameters.
    step: int32 scalar, batches seen.
    skipped: int32 scalar, steps whose loss or gradient was not finite.
    skipped_in_a_row: int32 scalar, how many of them end at `step`.
    carry: the model's state of each row of the batch, every leaf `[layers,
      batch, ...]`, with `training.carry_state`; else None.
  """

  params: Any
  opt_state: Any
  step: jax.Array
  skipped: jax.Array
  skipped_in_a_row: jax.Array
  carry: Any


class Model(NamedTuple):
  """A model without its arrays.

  Attributes:
    graphdef: structure; `nnx.merge(graphdef, params)` is the module.
    variables: `nnx.State` of abstract `nnx.Param`s with their metadata.
    decayed: `nnx.State` of bool like `variables`: takes weight decay.
  """

  graphdef: Any
  variables: Any
  decayed: Any


def abstract_model(config: decoder.DecoderConfig) -> Model:
  """Builds a model's structure; allocates nothing."""
  with nnx.use_eager_sharding(False):
    abstract = nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, variables = nnx.split(abstract)
  decayed = jax.tree.map(
    lambda v: v.get_metadata("weight_decay", False),
    variables,
    is_leaf=_is_variable,
  )
  return Model(graphdef, variables, decayed)


def merge(graphdef: Any, params: Any) -> decoder.Decoder:
  """Returns the module whose parameters are `params`."""
  with nnx.use_eager_sharding(False):
    return nnx.merge(graphdef, params)


def abstract_params(model: Model, mesh: jax.sharding.Mesh) -> Any:
  """Returns the parameters as `ShapeDtypeStruct`s with their shardings."""
  return _abstract(model.variables, mesh)


def make_optimizer(
  config: config_lib.Config, model: Model
) -> optax.GradientTransformation:
  """Returns the optimizer of a run, for plain parameters."""
  return optimizer.make(
    config.optimizer, config.training.steps, plain(model.decayed)
  )


def abstract_state(
  config: config_lib.Config, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the state of a run as `ShapeDtypeStruct`s with shardings.

  The one description of the state: its initialisation, the target of a
  restore and the argument of a compile-only run.
  """
  model = abstract_model(config.model)
  params = _abstract(model.variables, mesh)
  # Adam's moments keep the Variables they are made from, and so their axes.
  tx = optimizer.make(config.optimizer, config.training.steps, model.decayed)
  with nnx.use_eager_sharding(False):
    opt_state = jax.eval_shape(tx.init, model.variables)
  scalar = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())
  )
  carry = None
  if config.training.carry_state:
    carry = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=_row_sharding(mesh)
      ),
      jax.eval_shape(
        lambda p: merge(model.graphdef, p).init_state(
          config.training.batch_size
        ),
        params,
      ),
    )
  return TrainState(
    params, _abstract(opt_state, mesh), scalar, scalar, scalar, carry
  )


def initial_state(
  config: config_lib.Config, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the state before the first step, made in place on the mesh."""
  abstract = abstract_state(config, mesh)
  tx = make_optimizer(config, abstract_model(config.model))

  @functools.partial(jax.jit, out_shardings=shardings_of(abstract))
  def init():
    with nnx.use_eager_sharding(False):
      module = decoder.Decoder(config.model, rngs=nnx.Rngs(config.seed))
      params = plain(nnx.split(module)[1])
    carry = None
    if config.training.carry_state:
      carry = module.init_state(config.training.batch_size)
    zero = jnp.int32(0)
    return TrainState(params, tx.init(params), zero, zero, zero, carry)

  with jax.set_mesh(mesh):
    return init()


def shardings_of(abstract: Any) -> Any:
  """Returns the shardings of a tree of `ShapeDtypeStruct`s."""
  return jax.tree.map(lambda x: x.sharding, abstract)


def plain(tree: Any) -> Any:
  """Returns `tree` with each Variable replaced by its value, as dicts."""
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


def _abstract(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    plain(tree),
    plain(sharding.shardings(tree, mesh)),
  )


def _row_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(None, ("replica", "fsdp")))


def _is_variable(x: Any) -> bool:
  return isinstance(x, nnx.Variable)
