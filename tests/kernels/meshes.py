"""Runs a chunk function alone, and under `shard_map` over rows and heads."""

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
  """Runs a memory's `chunk` without a mesh, then sharded over a mesh.

  Args:
    chunk: the `chunk` of an op.
    given: the state; the state that segments start from, or None; the inputs.
    differentiate: whether to compute gradients of all of `given` besides the
      values.
    shape: numbers of devices over rows and over heads.
    **call: other arguments of the call.

  Returns:
    The result without a mesh, and the result with it.
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
