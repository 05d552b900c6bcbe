"""State space duality token by token, as the paper writes it (2405.21060).

Symbols: x the values, B the keys, C the queries; dt = write_rate, dt A =
log_decay, D = skip; h the state, with rows by B (the transpose of the paper's).

  h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T     eq. (1a), discretised
  y_t = h_t^T C_t + D x_t                        eq. (1b)

A is a number per head and not a matrix (section 2.4). This makes the model dual
to attention. Heads of a group share B and C (section 7.2).
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import at_least, option, options
from memcomp_kernels.shapes import If


@options
class Spec:
  """The options of the model; changing a field changes the function.

  Attributes:
    heads_per_group: number of consecutive heads that share a query and a key,
      >= 1. It divides the number of heads.
    skip: whether D x is added to an output. If False, `Inputs.skip` is None.
  """

  heads_per_group: int = option(1, at_least(1))
  skip: bool = True


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Heads of a group share query and key.

  Attributes:
    query: C of the paper, which reads the state.
    key: B of the paper, under which the value is written.
    value: x of the paper, the value that is written.
    log_decay: dt A <= 0.
    write_rate: dt >= 0.
    skip: D, the factor of the value that is added to the output. None unless
      `skip` is set.
  """

  query: Annotated[jax.Array, "batch time heads/heads_per_group key_dim"]
  key: Annotated[jax.Array, "batch time heads/heads_per_group key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1"]
  write_rate: Annotated[jax.Array, "batch time heads 1"]
  skip: Annotated[jax.Array | None, "batch time heads 1", If("skip")] = None


State = contract.MatrixState


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  h = state.memory
  C, B, x, dtA, dt, D = jax.tree.map(lambda a: a.astype(h.dtype), inputs)
  B, C = (jnp.repeat(a, spec.heads_per_group, axis=1) for a in (B, C))
  h = jnp.exp(dtA)[..., None] * h + einsum("bhn,bhp->bhnp", B, dt * x)
  y = einsum("bhnp,bhn->bhp", h, C)
  if D is not None:
    y = y + D * x
  segment_id = contract.next_segment_id(state.segment_id)
  return State(h, segment_id), y.astype(inputs.query.dtype)
