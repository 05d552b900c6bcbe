"""Trains new mixers, layer by layer, to reproduce the old ones.

Each new mixer gets its teacher layer's input. Its loss is the squared
difference of the two outputs over the square of the teacher's. So 1 is as good
as zeros, and 0 is the same function. Layers are independent, and only the new
mixers are trained.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from memcomp import config as config_lib
from memcomp.data import batch as batch_lib
from memcomp.models import abstract, decoder
from memcomp.models import stacks as stacks_lib
from memcomp.training import optimizer


class Distillation(NamedTuple):
  """Functions that start and step a distillation, see `make`."""

  start: Callable[[Any], tuple[Any, Any]]
  step: Callable[..., tuple[Any, Any, jax.Array]]


def make(
  teacher: decoder.DecoderConfig,
  student: decoder.DecoderConfig,
  layers: list[int],
  settings: config_lib.OptimizerConfig,
  steps: int,
) -> Distillation:
  """Returns the distillation of the mixers of `layers`.

  Args:
    teacher: config of the model to imitate.
    student: config of the model with new mixers; same depth and width.
    layers: depths of the new mixers.
    settings: config of the optimizer.
    steps: number of training steps, for the schedule.

  Returns:
    `start(params)` gives the trained part of the student's parameters, and the
    optimizer state. `step(trained, opt_state, params, teacher_params, batch)`
    gives both after one step, and each layer's relative squared error before
    it, `[len(layers)]`. It donates its first two arguments.
  """
  taught = abstract.model_of(teacher)
  model = abstract.model_of(student)
  stacks = {
    str(i): stack
    for i, stack in enumerate(stacks_lib.stacks_of(student))
    if stack.first in layers
  }
  tx = optimizer.make(
    settings,
    steps,
    abstract.Masks(*(_mixers(abstract.plain(x), stacks) for x in model.masks)),
    student.d_model,
  )

  def errors(trained, params, given, wanted, segment_ids):
    """Relative squared errors, stack by stack."""
    params = replaced(params, trained)
    blocks = nnx.merge(model.graphdef, params).layers
    found = []
    for name, stack in stacks.items():
      depths = jnp.array(stack.depths)
      graphdef, arrays = nnx.split(blocks[name])

      def one(_, layer, graphdef=graphdef):
        arrays, given, wanted = layer
        mixer = nnx.merge(graphdef, arrays).mixer
        state = mixer.init_state(*given.shape[:2])
        y, _ = mixer(given, state, segment_ids=segment_ids, max_position=0)
        return None, relative_error(y, wanted, segment_ids)

      layer = arrays, given[depths], wanted[depths]
      found.append(lax.scan(one, None, layer)[1])
    return jnp.concatenate(found)

  order = [
    layers.index(depth) for stack in stacks.values() for depth in stack.depths
  ]

  def step(trained, opt_state, params, teacher_params, batch: batch_lib.Batch):
    ids = batch.segment_ids
    old = nnx.merge(taught.graphdef, teacher_params)
    given, wanted = lax.stop_gradient(old.mixer_io(batch.tokens, ids))

    def loss(trained):
      found = errors(trained, params, given, wanted, ids)
      return found.sum(), found

    grads, found = jax.grad(loss, has_aux=True)(trained)
    updates, opt_state = tx.update(grads, opt_state, trained)
    trained = jax.tree.map(jnp.add, trained, updates)
    return (
      trained,
      opt_state,
      jnp.zeros_like(found).at[jnp.array(order)].set(found),
    )

  def start(params):
    # `step` donates these arrays, so they must be copies.
    trained = jax.tree.map(jnp.copy, _mixers(params, stacks))
    return trained, jax.jit(tx.init)(trained)

  return Distillation(start, jax.jit(step, donate_argnums=(0, 1)))


def replaced(params: Any, trained: Any) -> Any:
  """Returns a model's parameters with the trained mixers inserted."""
  layers = {
    name: {**block, "mixer": trained[name]} if name in trained else block
    for name, block in params["layers"].items()
  }
  return {**params, "layers": layers}


def _mixers(params: Any, stacks) -> Any:
  return {name: params["layers"][name]["mixer"] for name in stacks}


def relative_error(
  y: jax.Array, wanted: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
  """|y - wanted|^2 / |wanted|^2 over all tokens except padding.

  Args:
    y: `[batch, time, d_model]`.
    wanted: `[batch, time, d_model]`.
    segment_ids: `[batch, time]`, 0 is padding; None for no padding.
  """
  wide = jnp.promote_types(y.dtype, jnp.float32)
  y, wanted = y.astype(wide), wanted.astype(wide)
  if segment_ids is not None:
    y, wanted = (
      jnp.where(segment_ids[..., None] != 0, a, 0) for a in (y, wanted)
    )
  tiny = math.sqrt(jnp.finfo(wide).tiny)
  return jnp.sum((y - wanted) ** 2) / (jnp.sum(wanted**2) + tiny)
