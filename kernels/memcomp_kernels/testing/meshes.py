"""A form alone, and under `shard_map` over rows and heads."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memcomp_kernels.parallel import shard
from memcomp_kernels.testing import gradients


def alone_and_over_a_mesh(
  chunk: Callable[..., Any],
  given: tuple,
  *,
  differentiate: bool = True,
  shape: tuple[int, int] = (2, 2),
  **call: Any,
) -> tuple[Any, Any]:
  """Runs a memory's `chunk` without a mesh, then each device its own part.

  Args:
    chunk: of the memory's `api`.
    given: the state, what segments start from or None, and the inputs.
    differentiate: values and gradients of all that is given, not values alone.
    shape: devices over rows, and over heads.
    **call: the rest of the call.

  Returns:
    What it computes without a mesh, and with.
  """

  def run(state, fresh, inputs):
    sharded = shard.shard_chunk(
      chunk, batch_axes=("fsdp",), head_axes=("tensor",)
    )
    return sharded(state, inputs, reset_state=fresh, **call)

  def evaluate():
    if differentiate:
      return gradients.value_and_gradients(run, given)
    return jax.jit(run)(*given)

  alone = evaluate()
  devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
  with jax.set_mesh(Mesh(devices, ("fsdp", "tensor"))):
    return alone, evaluate()
