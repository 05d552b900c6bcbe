"""Spec, Inputs and State of test-time training."""

import dataclasses
from typing import NamedTuple

import jax

MODELS = ("linear", "mlp")
GRADIENT_AT = ("chunk_start", "token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a test-time training memory.

  Attributes:
    model: the inner model f: "linear" (one layer) or "mlp" (two, with GELU
      between them).
    expansion: hidden features of "mlp" per feature of a key, >= 1. Ignored by
      "linear".
    gradient_at: where the inner loss's gradient is taken: "chunk_start" (the
      paper's mini-batch form: at the weights before the chunk, for all its
      tokens) or "token" (at the weights before each token: online).
    chunk_size: tokens that share a chunk-start gradient, >= 1. Ignored by
      "token".
    forget_gate: whether weights decay; if False (the paper), `log_decay` is
      ignored.
    norm_eps: inside the layer norm of the inner model, > 0. It bounds that
      norm's Jacobian by about 1 / sqrt(eps).
  """

  model: str = "linear"
  expansion: int = 4
  gradient_at: str = "chunk_start"
  chunk_size: int = 16
  forget_gate: bool = False
  norm_eps: float = 1e-6

  def __post_init__(self):
    for name, choices in (("model", MODELS), ("gradient_at", GRADIENT_AT)):
      value = getattr(self, name)
      if value not in choices:
        raise ValueError(
          f"{name}={value!r} is not one of: {', '.join(choices)}"
        )
    for name in ("expansion", "chunk_size"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if not self.norm_eps > 0:
      raise ValueError(f"norm_eps={self.norm_eps} must be positive")

  @property
  def stale(self) -> bool:
    """Whether several tokens share one chunk-start gradient."""
    return self.gradient_at == "chunk_start" and self.chunk_size > 1

  def widths(self, dim: int) -> tuple[tuple[int, int], ...]:
    """Features in and out of every inner layer, for keys of `dim`."""
    if self.model == "linear":
      return ((dim, dim),)
    hidden = self.expansion * dim
    return ((dim, hidden), (hidden, dim))


class Inputs(NamedTuple):
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: `[batch, heads, dim]`, what the inner model is asked.
    key: `[batch, heads, dim]`, what it is trained on.
    value: `[batch, heads, dim]`, what it should answer; as wide as the key,
      because the inner model answers x + LN(model(x)).
    log_decay: log beta <= 0, `[batch, heads, 1]`; see `Spec.forget_gate`.
    write_rate: eta >= 0, `[batch, heads, 1]`, the inner learning rate.
    step_scale: c, `[batch, heads, 1]`: at this token the weights stand at
      this share of the way that the chunk's gradients have gone so far, about
      1 / j at the chunk's j-th token in the released models; None is 1. Only
      with stale gradients: else scale `write_rate`.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array
  write_rate: jax.Array
  step_scale: jax.Array | None = None


class Layer(NamedTuple):
  """One layer of the inner model, x W + b.

  Attributes:
    weight: W, `[batch, heads, in, out]`, float32 or wider.
    bias: b, `[batch, heads, out]`.
  """

  weight: jax.Array
  bias: jax.Array


Layers = tuple[Layer, ...]


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    layers: the inner model's weights after all gradients so far, each at its
      full rate: one layer, or two for "mlp".
    starts: the weights at the start of the current chunk, equal to `layers`
      (and never read) while `position` is 0; None with gradients per token.
    position: int32 `[batch]`, tokens since the chunk started, in
      [0, chunk_size); None with gradients per token.
    norm_scale: weight of the inner layer norm, `[batch, heads, dim]`; never
      changed by tokens.
    norm_bias: its bias, likewise.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  layers: Layers
  starts: Layers | None
  position: jax.Array | None
  norm_scale: jax.Array
  norm_bias: jax.Array
  segment_id: jax.Array
