"""Softmax attention over all tokens, or a window of them."""

from typing import Any

import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.softmax_attention import over_time as _over_time
from memcomp_kernels.softmax_attention import reference as _reference
from memcomp_kernels.softmax_attention import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
over_time = _over_time.over_time

_LIBRARY = ("library_tpu", "library_gpu")

IMPLEMENTATIONS = dispatch.Implementations(
  "softmax_attention",
  options={"seen": ("reference", "xla_chunked", *_LIBRARY)},
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  **{
    name: dispatch.Kernel(
      f"memcomp_kernels.softmax_attention.{name}",
      asks=(
        "state",
        "inputs",
        "spec",
        "segment_ids",
        "reset_state",
        "seen",
      ),
    )
    for name in _LIBRARY
  },
)


def _make_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: Any,
  length: int | None = None,
) -> types.State:
  """Makes `init_state`.

  Args:
    spec: the attention's meaning.
    batch: rows.
    heads: of keys and values; queries may have a multiple of them.
    key_dim: width of keys.
    value_dim: width of values.
    dtype: of keys and values.
    length: tokens that the state must hold where `spec.window_size` is None;
      not read otherwise. Longer segments lose their oldest tokens but the
      sinks.

  Raises:
    ValueError: `length` is missing or too short.
  """
  size = spec.window_size
  if size is None:
    if length is None or length <= spec.sink_tokens:
      raise ValueError(
        f"length={length} must be the tokens that the state can hold, more than"
        f" sink_tokens={spec.sink_tokens}: window_size is None"
      )
    size = length
  shape = (batch, heads, size)
  return types.State(
    keys=jnp.zeros((*shape, key_dim), dtype),
    values=jnp.zeros((*shape, value_dim), dtype),
    position=jnp.zeros(batch, jnp.int32),
    segment_id=jnp.zeros(batch, jnp.int32),
  )


def _check(spec, sizes, state):
  del state
  size = sizes.get("length", spec.window_size)
  if spec.window_size not in (None, size):
    raise ValueError(
      f"softmax_attention: the state holds {size} tokens, spec.window_size is"
      f" {spec.window_size}"
    )
  queries, heads = sizes.get("query_heads", sizes["heads"]), sizes["heads"]
  if heads and queries % heads:
    raise ValueError(
      f"softmax_attention: query has {queries} heads, not a multiple of the"
      f" {heads} heads of keys and values"
    )


softmax_attention = op_lib.Op(
  name="softmax_attention",
  about="""
  Softmax attention over all tokens so far, or a window of them.

  Heads of queries may share keys and values (grouped-query attention). Without
  `window_size` a fresh state holds as many tokens as the call has: ask for
  `length` where more calls follow, or they lose the oldest tokens.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  make_state=_make_state,
  room={"length": "time"},
  check=_check,
)

init_state, step = softmax_attention.init_state, softmax_attention.step
chunk, reference = softmax_attention.chunk, softmax_attention.reference
