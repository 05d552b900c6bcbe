"""Gated linear attention with one gate a head: GLA's scalar sibling.

  S_t = alpha_t S_{t-1} + k_t v_t^T,      y_t = scale S_t^T q_t

(arXiv 2312.06635, section 4.1, with alpha constant over channels; RetNet with a
decay by token.) All that a new memory needs stands here: what tokens bring and
what is kept, one token as the paper writes it, and one tile of the chunk form.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import Op, affine, contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.facts import Facts
from memcomp_kernels.options import option, options, positive
from memcomp_kernels.parallel import state_passing


@options
class Spec:
  """The meaning; `scale` is that of reads, > 0."""

  scale: float = option(1.0, positive)


class Inputs(NamedTuple):
  """What one token brings; `log_decay` is log alpha <= 0."""

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1"]


class State(NamedTuple):
  """What is kept: S, and the current segment (0 before any token)."""

  memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; inputs are `[batch, heads, ...]`."""
  S = state.memory
  q, k, v, log_alpha = (x.astype(S.dtype) for x in inputs)
  S = jnp.exp(log_alpha)[..., None] * S + k[..., None] * v[..., None, :]
  y = spec.scale * jnp.einsum("bhkv,bhk->bhv", S, q, precision="highest")
  state = State(S, contract.next_segment_id(state.segment_id))
  return state, y.astype(inputs.query.dtype)


def prepare(inputs: Inputs, spec: Spec) -> affine.Tile:
  """What a tile `[batch, heads, tile, ...]` needs beside the memory."""
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  value, log_decay = inputs.value.astype(wide), inputs.log_decay.astype(wide)
  query = spec.scale * inputs.query
  return affine.outer_tile(query, inputs.key, value, log_decay[..., 0])


def form(call: dispatch.Call):
  """The memory under the chunk form."""
  return affine.form(prepare, call)


scalar_gla = Op(
  name="scalar_gla",
  about="Gated linear attention with one gate a head.",
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=step,
  forms={"xla_chunked": chunked.implementation(form)},
  facts=lambda spec: Facts(
    objective="`-<S^T k, v>`",
    chunk="Exact at any tile.",
    source="GLA, arXiv 2312.06635, section 4.1",
    floats="H * d_k * d_v",
    flops="4 * H * d_k * d_v",
  ),
  order=("q", "k", "v", "g"),
  pass_state=lambda _: state_passing.linear,
)
