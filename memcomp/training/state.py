"""The training state: a plain tree of arrays, and its sharding."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from memcomp import config as config_lib
from memcomp import prng, sharding
from memcomp.models import abstract, decoder
from memcomp.training import optimizer, passing


class TrainState(NamedTuple):
  """Everything that one step passes to the next.

  Attributes:
    params: nested dict of float32 arrays.
    opt_state: optax state; moments are sharded like the parameters.
    step: int32 scalar, number of training batches.
    skipped: int32 scalar, number of steps with a non-finite loss or gradient.
    skipped_in_a_row: int32 scalar, number of them that end at `step`.
    carry: with `training.carry_state` or `training.state_passing`, the model's
      state of each row of the batch; else None.
  """

  params: Any
  opt_state: Any
  step: jax.Array
  skipped: jax.Array
  skipped_in_a_row: jax.Array
  carry: Any


def make_optimizer(
  config: config_lib.Config, model: abstract.Model
) -> optax.GradientTransformation:
  """Returns the optimizer of a run, for plain parameters."""
  return _optimizer(config, abstract.plain(model.masks))


def _optimizer(
  config: config_lib.Config, masks: abstract.Masks
) -> optax.GradientTransformation:
  steps, width = config.training.steps, config.model.d_model
  return optimizer.make(config.optimizer, steps, masks, width)


def abstract_state(
  config: config_lib.Config, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the state of a run as `ShapeDtypeStruct`s with shardings.

  This is its only description, for initialization, restoring and compile-only
  runs.
  """
  model = abstract.model_of(config.model)
  params = abstract.on_mesh(model.variables, mesh)
  # Moments keep the Variables that they come from, and so their axes.
  tx = _optimizer(config, model.masks)
  opt_state = jax.eval_shape(tx.init, model.variables)
  scalar: Any = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())
  )
  carry = jax.eval_shape(
    lambda p: initial_carry(config, model, p, config.training.batch_size),
    params,
  )
  carry = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    carry,
    carry_shardings(config, model, mesh),
  )
  return TrainState(
    params, abstract.on_mesh(opt_state, mesh), scalar, scalar, scalar, carry
  )


def initial_state(
  config: config_lib.Config, mesh: jax.sharding.Mesh
) -> TrainState:
  """Returns the state before the first step, created on the mesh."""
  target = abstract_state(config, mesh)
  model = abstract.model_of(config.model)
  tx = make_optimizer(config, model)

  # Drawing numbers once does not justify minutes of LLVM optimization on a CPU.
  quick = {"xla_backend_optimization_level": 0}
  on_cpu = mesh.devices.flat[0].platform == "cpu"

  @functools.partial(
    jax.jit,
    out_shardings=abstract.shardings_of(target),
    compiler_options=quick if on_cpu else None,
  )
  def init():
    module = decoder.Decoder(config.model, rngs=nnx.Rngs(prng.key(config.seed)))
    params = abstract.plain(nnx.split(module)[1])
    carry = initial_carry(config, model, params, config.training.batch_size)
    zero = jnp.int32(0)
    start = TrainState(params, tx.init(params), zero, zero, zero, carry)
    # Remove weak types: a step does not return them, so the second step would
    # recompile.
    return jax.tree.map(lambda x: x.astype(x.dtype), start)

  with jax.set_mesh(mesh):
    return init()


def initial_carry(
  config: config_lib.Config, model: abstract.Model, params: Any, rows: int
) -> Any:
  """Returns the carry before the first step; None if none is kept."""
  if not passing.keeps_state(config):
    return None
  return nnx.merge(model.graphdef, params).init_state(rows)


def row_axes(config: config_lib.Config, model: abstract.Model) -> Any:
  """Returns the row axis of each leaf of the carry."""
  few, more = (
    jax.eval_shape(
      lambda p, n=n: initial_carry(config, model, p, n),
      abstract.plain(model.variables),
    )
    for n in (2, 3)
  )
  return jax.tree.map(
    lambda a, b: next(
      i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n
    ),
    few,
    more,
  )


def carry_shardings(
  config: config_lib.Config, model: abstract.Model, mesh: jax.sharding.Mesh
) -> Any:
  """Returns the shardings of the carry, whose rows lie like the batch's."""
  rows = sharding.batch_sharding(mesh).spec[0]
  return jax.tree.map(
    lambda axis: NamedSharding(mesh, PartitionSpec(*[None] * axis, rows)),
    row_axes(config, model),
  )
