"""What the contract suite needs to know about a memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from memcomp_kernels import op as op_lib
from memcomp_kernels.math import activations


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
  """A memory under test.

  Attributes:
    name: name of the memory.
    op: the op under test.
    specs: the Specs that are checked, by a short name.
    typical: names of the few Specs with which layout, packing and precision are
      checked. These do not depend on the rest of the Spec.
    make_inputs: (key, spec, batch, time, heads, key_dim, value_dim) -> Inputs
      of ordinary size.
    make_state: (key, spec, batch, heads, key_dim, value_dim) -> a state like
      those before the first token, with random memories.
    edges: Inputs -> {name: Inputs at an edge of the input's range}.
    smooth: names of the Specs whose outputs are differentiable functions of all
      arguments, with the gradients that are computed; default all.
    composed: names of Specs that only combine options of other Specs. They are
      left to the slow tests.
  """

  name: str
  op: op_lib.Op
  specs: dict[str, Any]
  typical: tuple[str, ...]
  make_inputs: Callable[..., Any]
  make_state: Callable[..., Any]
  edges: Callable[[Any], dict[str, Any]]
  smooth: tuple[str, ...] | None = None
  composed: tuple[str, ...] = ()


def unit(x: jax.Array) -> jax.Array:
  """L2-normalises the last axis."""
  return activations.l2_norm(x, 0.0)
