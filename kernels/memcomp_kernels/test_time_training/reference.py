"""Test-time training token by token, as the paper writes it (2407.04620).

Symbols: W the inner model's weights, biases included; k, v, q the training,
label and test view of a token; eta = write_rate; beta = exp(log_decay); c =
step_scale. W' are the weights at the start of the current chunk. If gradients
are taken per token, W' = W_{t-1}.

  model   f(x; W) = x + LN(model(x; W))               section 2.7
  loss    l(W; t) = |f(k_t; W) - v_t|^2 / 2           eq. (4)
  update  A_t = beta_t A_{t-1} - eta_t grad l(W'; t)  eq. (6), A = W' at first
          W_t = W' + c_t (A_t - W')                   released code
  output  y_t = f(q_t; W_t)                           eq. (5)

The output is read after the write. The chunk's last W_t is the next chunk's W'.
Without forget gate and with c = 1, A_t = W_t is the paper's mini-batch step.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.math import activations
from memcomp_kernels.options import at_least, one_of, option, options, positive
from memcomp_kernels.shapes import If

MODELS = ("linear", "mlp")
GRADIENT_AT = ("chunk_start", "token")


@options
class Spec:
  """The options of a test-time training memory.

  Attributes:
    model: the inner model f, "linear" (one layer) or "mlp" (two layers with
      GELU between them).
    expansion: hidden features of "mlp" per feature of a key, >= 1. "linear"
      ignores it.
    gradient_at: where the gradient of the inner loss is taken. "chunk_start" is
      the paper's mini-batch form, which takes it at the weights before the
      chunk for all its tokens. "token" takes it at the weights before each
      token (online).
    chunk_size: tokens that share a chunk-start gradient, >= 1. "token" ignores
      it.
    forget_gate: whether weights decay. If False (as in the paper), `log_decay`
      is ignored.
    norm_eps: eps inside the layer norm of the inner model, > 0. It bounds that
      norm's Jacobian by about 1 / sqrt(eps).
  """

  model: str = option("linear", one_of(MODELS))
  expansion: int = option(4, at_least(1))
  gradient_at: str = option("chunk_start", one_of(GRADIENT_AT))
  chunk_size: int = option(16, at_least(1))
  forget_gate: bool = False
  norm_eps: float = option(1e-6, positive)

  @property
  def chunked(self) -> bool:
    """Whether tokens of a chunk share the gradient at its start."""
    return self.gradient_at == "chunk_start" and self.chunk_size > 1

  def widths(self, dim: int) -> tuple[tuple[int, int], ...]:
    """Returns the features in and out of each layer; `dim` is the key's."""
    if self.model == "linear":
      return ((dim, dim),)
    hidden = self.expansion * dim
    return ((dim, hidden), (hidden, dim))


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: input at which the inner model is read.
    key: input on which the inner model is trained.
    value: label of the inner model, as wide as the key, because the inner model
      outputs x + LN(model(x)).
    log_decay: log beta <= 0. Ignored unless `forget_gate`.
    write_rate: eta >= 0, the inner learning rate.
    step_scale: c. At this token, the weights have moved by this share of the
      chunk's gradient steps so far. The released models use about 1 / j at the
      chunk's j-th token. None is 1. It requires gradients at chunk starts;
      otherwise scale `write_rate`.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads key_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1", If("forget_gate")]
  write_rate: Annotated[jax.Array, "batch time heads 1"]
  step_scale: Annotated[
    jax.Array | None, "batch time heads 1", If("chunked", required=False)
  ] = None


class Layer(NamedTuple):
  """One layer of the inner model, x W + b; float32 or wider.

  Attributes:
    weight: W, `[batch, heads, in, out]`.
    bias: b, `[batch, heads, out]`.
  """

  weight: jax.Array
  bias: jax.Array


Layers = tuple[Layer, ...]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    layers: the inner model's weights after all gradients so far, each at its
      full rate. There is one layer, or two for "mlp".
    starts: the weights at the start of the current chunk. They equal `layers`
      and are never read while `position` is 0. None with gradients per token.
    position: tokens since the chunk started, in [0, chunk_size). None with
      gradients per token.
    norm_scale: scale of the inner layer norm, which no token changes.
    norm_bias: bias of the inner layer norm, which no token changes.
    segment_id: the current segment, 0 before any token.
  """

  layers: Layers
  starts: Annotated[Layers | None, If("chunked")]
  position: Annotated[jax.Array | None, "batch", "int32", If("chunked")]
  norm_scale: Annotated[jax.Array, "batch heads key_dim"]
  norm_bias: Annotated[jax.Array, "batch heads key_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def answer(
  layers: Layers,
  x: jax.Array,
  norm_scale: jax.Array,
  norm_bias: jax.Array,
  eps: float,
) -> jax.Array:
  """Returns f(x; W), `[batch, heads, dim]`."""
  z = x
  for i, (weight, bias) in enumerate(layers):
    z = jax.nn.gelu(z) if i else z
    z = einsum("bhi,bhio->bho", z, weight) + bias
  return x + norm_scale * activations.layer_norm(z, eps) + norm_bias


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  dtype = state.norm_scale.dtype
  q, k, v, log_beta, eta, c = jax.tree.map(lambda x: x.astype(dtype), inputs)

  def f(W, x):
    return answer(W, x, state.norm_scale, state.norm_bias, spec.norm_eps)

  def loss(W):
    return jnp.sum(jnp.square(f(W, k) - v)) / 2

  def of_head(gate, array):
    return gate.reshape(gate.shape[:2] + (1,) * (array.ndim - 2))

  def write(A, gradient):
    return of_head(jnp.exp(log_beta), A) * A - of_head(eta, A) * gradient

  W_start = state.layers
  if state.position is not None:  # chunk-start gradients
    W_start = contract.batched_where(
      state.position == 0, state.layers, state.starts
    )
  A = W = jax.tree.map(write, state.layers, jax.grad(loss)(W_start))
  if c is not None:
    W = jax.tree.map(lambda A, W: W + of_head(c, A) * (A - W), A, W_start)
  y = f(W, q)

  state = state._replace(
    layers=A, segment_id=contract.next_segment_id(state.segment_id)
  )
  if state.position is not None:
    position = (state.position + 1) % spec.chunk_size
    state = state._replace(
      layers=contract.batched_where(position == 0, W, A),
      starts=contract.batched_where(position == 0, W, W_start),
      position=position,
    )
  return state, y.astype(inputs.query.dtype)
