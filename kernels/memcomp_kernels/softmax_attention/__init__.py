"""Softmax attention over all tokens, or a window of them (the baseline)."""

from memcomp_kernels import dispatch, facts, shapes
from memcomp_kernels import op as op_lib
from memcomp_kernels.softmax_attention import over_time, reference, tile

__all__ = ["softmax_attention"]


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  length: int | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the attention's options.
    sizes: sizes and dtype of the state. `heads` are those of keys and values.
      Queries may have a multiple of them.
    length: number of tokens that the state must hold if `spec.window_size` is
      None; ignored otherwise. Longer segments lose their oldest tokens, except
      the sinks. The state has room for at least one token beside the sinks.

  Raises:
    ValueError: `length` is missing.
  """
  size = spec.window_size
  if size is None:
    if length is None:
      raise ValueError(
        "length must be the tokens that the state can hold: window_size is None"
      )
    size = max(length, spec.sink_tokens + 1)
  return reference.State(
    keys=sizes.filled(None, size, sizes.key_dim),
    values=sizes.filled(None, size, sizes.value_dim),
    position=sizes.counts(),
    segment_id=sizes.counts(),
  )


def _check(spec, sizes, state):
  del state
  size = sizes.get("length", spec.window_size)
  if spec.window_size not in (None, size):
    raise ValueError(
      f"softmax_attention: the state holds {size} tokens, spec.window_size is"
      f" {spec.window_size}"
    )
  if size is not None and size <= spec.sink_tokens:
    raise ValueError(
      f"softmax_attention: the state holds {size} tokens, no more than"
      f" sink_tokens={spec.sink_tokens}; make the state with the same spec"
    )
  queries, heads = sizes.get("query_heads", sizes["heads"]), sizes["heads"]
  if heads and queries % heads:
    raise ValueError(
      f"softmax_attention: query has {queries} heads, not a multiple of the"
      f" {heads} heads of keys and values"
    )


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  kept = "min(n, W)" if spec.window_size else "n"

  def letters(n: int) -> dict[str, float]:
    window = {"W": spec.window_size} if spec.window_size else {}
    seen = facts.tokens_seen(n, spec.window_size or n, spec.chunk_size or 1)
    return window | {"w": seen}

  return op_lib.Facts(
    objective="None: tokens are kept. `y` minimises `sum_j p_j |y - v_j|^2`",
    chunk="Exact at any tile.",
    source=(
      "Attention, arXiv 1706.03762, eq. (1); with shared keys and values"
      " 2305.13245, with sinks StreamingLLM, 2309.17453"
    ),
    floats=f"G * {kept} * (d_k + d_v)",
    flops="2 * H * (d_k + d_v) * w",
    letters=letters,
  )


softmax_attention = op_lib.Op.of(
  reference,
  name="softmax_attention",
  about="""
  Softmax attention over all tokens so far, or a window of them.

  Heads of queries may share keys and values (grouped-query attention). Without
  `window_size` a fresh state holds as many tokens as the call has: give
  `length`, the tokens of all calls, where more calls follow.
  """,
  forms={
    "xla_chunked": tile.chunk,
    "library_tpu": dispatch.Kernel(
      "memcomp_kernels.softmax_attention.library_tpu"
    ),
    "library_gpu": dispatch.Kernel(
      "memcomp_kernels.softmax_attention.library_gpu"
    ),
  },
  facts=_facts,
  make_state=_make_state,
  room={"length": "time"},
  output="batch, time, query_heads, value_dim",
  pass_state=over_time.strategy,
  check=_check,
)
