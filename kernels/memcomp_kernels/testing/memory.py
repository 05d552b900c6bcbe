"""What the contract suite needs to know about a memory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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


def fresh(op: op_lib.Op, spec: Any, **sizes: Any) -> Any:
  """The op's state before the first token, as wide as the program allows."""
  dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
  return op.init_state(spec, dtype=dtype, **sizes)


def _repeated(x: jax.Array) -> jax.Array:
  return jnp.broadcast_to(x[:, :1], x.shape)


EDGES: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {
  "forgets all": ("log_decay", lambda x: -1e4 * jnp.ones_like(x)),
  "forgets nothing": ("log_decay", lambda x: 0 * x),
  "writes nothing": ("write_rate", lambda x: 0 * x),
  "writes all": ("write_rate", jnp.ones_like),
  "zero keys": ("key", lambda x: 0 * x),
  "zero queries": ("query", lambda x: 0 * x),
  "zero values": ("value", lambda x: 0 * x),
  "repeated keys": ("key", _repeated),
}
"""Edges that many memories have: the field of `Inputs`, and what it becomes."""

GATES = ("forgets all", "forgets nothing", "writes nothing", "writes all")
KEYS = ("zero keys", "zero values", "repeated keys")


def edges(inputs: Any, *names: str) -> dict[str, Any]:
  """The inputs at the edges of these names."""
  found = {}
  for name in names:
    field, change = EDGES[name]
    found[name] = inputs._replace(**{field: change(getattr(inputs, field))})
  return found
