"""Linear attention token by token, as the paper writes it (2006.16236).

Symbols: phi the feature map; S the memory, z the sum of features; alpha =
exp(log_decay), 1 without a forget gate.

  S_t = alpha_t S_{t-1} + phi(k_t) v_t^T                      eq. (18)
  z_t = alpha_t z_{t-1} + phi(k_t)                            eq. (19)
  y_t = S_t^T scale phi(q_t) / (z_t . scale phi(q_t) + eps)   eq. (20)

Without `normalize` there is no z and no division. The paper has no decay.
RetNet (2307.08621) has one that is constant per head. Here it is per token and
head.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import one_of, option, options, positive
from memcomp_kernels.shapes import If

FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "elu": lambda x: jax.nn.elu(x) + 1,
  "relu": jax.nn.relu,
  "softmax": lambda x: jax.nn.softmax(x, axis=-1),
  "identity": lambda x: x,
}
"""phi over the last axis, by name."""

NOT_NEGATIVE = ("elu", "relu", "softmax")
"""Names of the maps whose features are never negative.

With these a sum of phi(q) . phi(k) can replace the sum of exp(q . k) that
attention's softmax divides by.
"""


@options
class Spec:
  """The options of linear attention; changing a field changes the function.

  Attributes:
    feature_map: phi of query and key, "elu" (elu + 1), "relu", "softmax" (over
      the features) or "identity".
    normalize: whether reads are divided by the sum of weights. This requires
      features that are not negative.
    forget_gate: whether the memory and the sum of features decay.
    scale: factor of the queries' features, > 0; None is key_dim ** -0.5. With
      `normalize` it matters only in comparison with `eps`.
    eps: added to the sum of weights, > 0.
  """

  feature_map: str = option("elu", one_of(FEATURE_MAPS))
  normalize: bool = True
  forget_gate: bool = False
  scale: float | None = option(None, positive)
  eps: float = option(1e-6, positive)

  def __post_init__(self):
    if self.normalize and self.feature_map not in NOT_NEGATIVE:
      raise ValueError(
        f"normalize=True divides by a sum that feature_map={self.feature_map!r}"
        " lets pass through zero"
      )


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: the query before the feature map.
    key: the key before the feature map.
    value: the value that is written.
    log_decay: log alpha <= 0. None unless `forget_gate`.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[
    jax.Array | None, "batch time heads 1", If("forget_gate")
  ] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    memory: S.
    normalizer: z, the sum of the keys' features; None unless `normalize`.
    segment_id: the current segment, 0 before any token.
  """

  memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  normalizer: Annotated[
    jax.Array | None, "batch heads key_dim", If("normalize")
  ]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  S, z, _ = state
  phi = FEATURE_MAPS[spec.feature_map]
  q, k, v = (x.astype(S.dtype) for x in inputs[:3])
  q, k = contract.read_scale(spec, k.shape[-1]) * phi(q), phi(k)
  alpha = jnp.ones((), S.dtype)
  if inputs.log_decay is not None:
    alpha = jnp.exp(inputs.log_decay.astype(S.dtype))
  S = alpha[..., None] * S + einsum("bhk,bhv->bhkv", k, v)
  y = einsum("bhkv,bhk->bhv", S, q)
  if z is not None:
    z = alpha * z + k
    y = y / (einsum("bhk,bhk->bh", z, q)[..., None] + spec.eps)
  segment_id = contract.next_segment_id(state.segment_id)
  return State(S, z, segment_id), y.astype(inputs.query.dtype)
