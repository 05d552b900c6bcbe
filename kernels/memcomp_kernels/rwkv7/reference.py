"""RWKV-7's time mixing token by token (arXiv 2503.14456, section 4.1).

Symbols: S the memory, rows by key, the transpose of the paper's wkv; r, k~, v,
kappa^ query, key, value and removal key; w = exp(log_decay), a = write_rate.

  wkv_t = wkv_{t-1} (diag(w_t) - kappa^_t^T (a_t * kappa^_t)) + v_t^T k~_t
                                                              eq. (17)
  S_t = diag(w_t) S_{t-1} - (a_t * kappa^_t) (S_{t-1}^T kappa^_t)^T + k~_t v_t^T
  p_t = scale S_t^T r_t                                       eq. (18)

The removed value is read from the memory before the decay. p is read after the
write. The bonus of eq. (20) is added to p outside of the memory.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import option, options, positive


@options
class Spec:
  """The options of an RWKV-7 memory; changing a field changes the function.

  Attributes:
    scale: factor of reads, > 0; None is key_dim ** -0.5.
  """

  scale: float | None = option(1.0, positive)


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: the receptance r.
    key: the replacement key k~, the key of the write.
    value: the value that is written.
    removal_key: kappa^, of length 1, the key whose value is removed.
    log_decay: log w <= 0 of every channel.
    write_rate: the in-context learning rate a in [0, 1] of every channel, the
      share of `removal_key` that is removed.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  removal_key: Annotated[jax.Array, "batch time heads key_dim"]
  log_decay: Annotated[jax.Array, "batch time heads key_dim"]
  write_rate: Annotated[jax.Array, "batch time heads key_dim"]


State = contract.MatrixState


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  S = state.memory
  r, k, v, kappa, log_w, a = (x.astype(S.dtype) for x in inputs)
  removed = einsum("bhkv,bhk->bhv", S, kappa)
  S = jnp.exp(log_w)[..., None] * S
  S = S - einsum("bhk,bhv->bhkv", a * kappa, removed)
  S = S + einsum("bhk,bhv->bhkv", k, v)
  p = contract.read_scale(spec, k.shape[-1]) * einsum("bhkv,bhk->bhv", S, r)
  segment_id = contract.next_segment_id(state.segment_id)
  return State(S, segment_id), p.astype(inputs.query.dtype)
