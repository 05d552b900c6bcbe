"""Infini-attention token by token, as the paper writes it (2404.07143).

Symbols: q, k, v of the token, where q and k of the memory have no position;
sigma = elu + 1; M, z what is written so far; M', z' the same before the current
segment; g = read_gate, the paper's sigmoid(beta).

  read     A_mem = sigma(q) M' / (sigma(q) z')                       eq. (3)
  linear   M <- M + sigma(k)^T v,    z <- z + sigma(k)               eq. (4)
  delta    M <- M + sigma(k)^T (v - sigma(k) M' / (sigma(k) z'))     eq. (5)
  output   A = g A_mem + (1 - g) A_dot                               eq. (6)

A_dot is softmax attention over the segment's tokens so far, or over a window.
The paper writes a segment's tokens at once, after the segment. The sums are the
same. In segments of one token M' holds all tokens before it. eps is added to
the divisor of every quotient.
"""

from typing import Annotated, NamedTuple

import jax

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import at_least, one_of, option, options, positive
from memcomp_kernels.shapes import If
from memcomp_kernels.softmax_attention import reference as attention

RULES = ("linear", "delta")


@options
class Spec:
  """The options of Infini-attention; changing a field changes the function.

  Attributes:
    segment_size: number of tokens that read the memory before the first of
      them, >= 1. With 1 (the form per token) each token reads what all tokens
      before it wrote.
    window_size: number of tokens that local attention sees, the current one
      included, >= 1. None means the token's segment, as in the paper.
    rule: "linear" writes values. "delta" writes the error of the memory's
      prediction of the value.
    eps: added to the sum of weights, > 0.
  """

  segment_size: int = option(256, at_least(1))
  window_size: int | None = option(None, at_least(1))
  rule: str = option("delta", one_of(RULES))
  eps: float = option(1e-5, positive)

  @property
  def chunked(self) -> bool:
    """Whether tokens of a segment share the memory at its start."""
    return self.segment_size > 1

  @property
  def window(self) -> int:
    """Number of tokens that local attention keeps."""
    return self.window_size or self.segment_size

  def local(self) -> attention.Spec:
    """Returns the options of local attention."""
    if self.window_size is not None:
      return attention.Spec(window_size=self.window_size)
    # A window of one chunk that moves by chunks begins where the segment does.
    return attention.Spec(
      window_size=self.segment_size, chunk_size=self.segment_size
    )


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: query of local attention.
    key: key of local attention.
    value: value of both local attention and memory.
    read_gate: g in [0, 1], the share of the memory.
    memory_query: query of the memory, before the feature map; None for `query`.
      The paper's has no rotary position.
    memory_key: key of the memory, before the feature map; None for `key`.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  read_gate: Annotated[jax.Array, "batch time heads 1"]
  memory_query: Annotated[jax.Array | None, "batch time heads key_dim"] = None
  memory_key: Annotated[jax.Array | None, "batch time heads key_dim"] = None


class Association(NamedTuple):
  """What has been written to the memory; float32 or wider.

  Attributes:
    memory: M.
    normalizer: z, the sum of the keys' features.
  """

  memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  normalizer: Annotated[jax.Array, "batch heads key_dim"]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    keys: keys of local attention's newest tokens, in the rows of a `window`.
    values: values of these tokens.
    association: the memory with everything that has been written so far.
    start: the memory before the current segment of `Spec.segment_size` tokens.
      It equals `association` and is never read between two segments. None in
      the form per token.
    position: tokens of the current sequence so far.
    segment_id: the current sequence, 0 before any token.
  """

  keys: Annotated[jax.Array, "batch heads window key_dim"]
  values: Annotated[jax.Array, "batch heads window value_dim"]
  association: Association
  start: Annotated[Association | None, If("chunked")]
  position: Annotated[jax.Array, "batch", "int32"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def sigma(x: jax.Array) -> jax.Array:
  """Returns the features of a query or key."""
  return jax.nn.elu(x) + 1


def associate(
  written: Association,
  start: Association,
  features: tuple[jax.Array, jax.Array],
  v: jax.Array,
  spec: Spec,
) -> tuple[Association, jax.Array]:
  """Reads with sigma(q), then writes sigma(k) and v of one token."""
  q, k = features

  def answer(x):
    sums = einsum("bhk,bhk->bh", x, start.normalizer)[..., None]
    return einsum("bhk,bhkv->bhv", x, start.memory) / (sums + spec.eps)

  u = v - answer(k) if spec.rule == "delta" else v
  M = written.memory + einsum("bhk,bhv->bhkv", k, u)
  return Association(M, written.normalizer + k), answer(q)


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Reads the memory, writes one token, attends; see `Op.step`."""
  dtype = state.keys.dtype
  q, k, v, g, memory_q, memory_k = jax.tree.map(
    lambda x: x.astype(dtype), inputs
  )
  memory_q = q if memory_q is None else memory_q
  memory_k = k if memory_k is None else memory_k

  local, A_dot = attention.step(
    attention.State(state.keys, state.values, state.position, state.segment_id),
    attention.Inputs(q, k, v),
    spec=spec.local(),
  )
  start = state.association
  if state.start is not None:
    first = state.position % spec.segment_size == 0
    start = contract.batched_where(first, state.association, state.start)
  association, A_mem = associate(
    state.association, start, (sigma(memory_q), sigma(memory_k)), v, spec
  )
  if state.start is not None:
    last = local.position % spec.segment_size == 0
    start = contract.batched_where(last, association, start)
  y = g * A_mem + (1 - g) * A_dot
  state = State(
    keys=local.keys,
    values=local.values,
    association=association,
    start=None if state.start is None else start,
    position=local.position,
    segment_id=local.segment_id,
  )
  return state, y.astype(inputs.query.dtype)
