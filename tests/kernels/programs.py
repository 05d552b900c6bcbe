"""Functions of a memory, compiled.

Called outside jit, each operation of a function is a program of its own: a
file of tests then compiles hundreds of them.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax

from memcomp_kernels import dispatch, shapes

STATIC = {"spec", "tiling", "implementation", "max_position"}


@functools.cache
def compiled(function: Callable) -> Callable:
  """Returns `function`, compiled once per Spec and shapes."""
  names = STATIC & set(inspect.signature(function).parameters)
  return jax.jit(function, static_argnames=sorted(names))


@functools.cache
def direct(function: Callable) -> Callable:
  """Returns an implementation as a function of state, inputs and options.

  It leaves statistics out.
  """

  def run(
    state,
    inputs,
    *,
    spec,
    segment_ids=None,
    reset_state=None,
    max_position=None,
    tiling=None,
  ):
    # As the op does before it chooses an implementation.
    inputs = shapes.without_unused(inputs, spec)
    options = segment_ids, reset_state, max_position, tiling
    return function(dispatch.Call(state, inputs, spec, *options))[:2]

  return run


def of(api: Any) -> types.SimpleNamespace:
  """Returns a memory's `step`, `chunk` and `reference`, compiled."""
  return types.SimpleNamespace(
    step=compiled(api.step),
    chunk=compiled(api.chunk),
    reference=compiled(api.reference),
  )
