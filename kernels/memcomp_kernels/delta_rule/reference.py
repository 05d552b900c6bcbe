"""The delta rule token by token, as its papers write it.

Symbols: S the memory, rows by key; q, k, v query, key and value; alpha =
exp(log_decay); beta = write_rate.

  S_t = alpha_t S_{t-1}
        + beta_t k_t (v_t - (alpha_t S_{t-1})^T k_t)^T   2412.06464, section 3.1
  o_t = scale S_t^T q_t

The papers write S transposed, and write the same update as alpha_t S_{t-1} (I -
beta_t k_t k_t^T) + beta_t v_t k_t^T. alpha_t = 1 is DeltaNet (2406.06484). The
error is taken after the decay. The output is read after the write.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import option, options, positive
from memcomp_kernels.shapes import If


@options
class Spec:
  """The options of a delta rule memory; changing a field changes the function.

  Attributes:
    forget_gate: whether the memory decays (Gated DeltaNet). If False
      (DeltaNet), `log_decay` is ignored.
    scale: factor of the read, > 0; None is key_dim ** -0.5.
  """

  forget_gate: bool = True
  scale: float | None = option(None, positive)


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: the query that reads the memory.
    key: key of length 1. With longer keys the memory may grow without bound.
    value: the value that is written.
    log_decay: log alpha <= 0. Only Gated DeltaNet has it.
    write_rate: beta in [0, 1], or in [0, 2] for transitions with negative
      eigenvalues (arXiv 2411.12537).
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1", If("forget_gate")]
  write_rate: Annotated[jax.Array, "batch time heads 1"]


State = contract.MatrixState


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  S = state.memory
  q, k, v, log_alpha, beta = (x.astype(S.dtype) for x in inputs)
  S = jnp.exp(log_alpha)[..., None] * S
  error = v - einsum("bhkv,bhk->bhv", S, k)
  S = S + einsum("bhk,bhv->bhkv", k, beta * error)
  o = contract.read_scale(spec, k.shape[-1]) * einsum("bhkv,bhk->bhv", S, q)
  segment_id = contract.next_segment_id(state.segment_id)
  return State(S, segment_id), o.astype(inputs.query.dtype)
