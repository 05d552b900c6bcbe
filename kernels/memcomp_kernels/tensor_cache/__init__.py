"""Tensor Cache: a window beside a decayed memory (arXiv 2605.22884)."""

from memcomp_kernels import dispatch, facts
from memcomp_kernels import op as op_lib
from memcomp_kernels.tensor_cache import over_time, reference, xla_chunked

__all__ = ["tensor_cache"]


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  kept = "d_k + d_v + m" if spec.routes_evicted else "d_k + d_v"
  lanes = "m" if spec.timescales == 1 else f"{spec.timescales} * m"
  columns = "(d_v + 1)" if spec.read_norm else "d_v"
  products = {"outer": 4, "delta": 6, "wedge": 6}[spec.rule]
  return op_lib.Facts(
    objective="`-<k A, v>`; `rule=delta`: `|k A' - v|^2 / 2`",
    chunk=(
      "Tokens read and correct `A'`, the memory before their chunk of"
      f" {spec.chunk_size}. With `write_population=evicted` a token is written"
      " when it leaves the window, and `A'` is the memory before it: exact at"
      " any tile."
    ),
    source=(
      "Tensor Cache, arXiv 2605.22884, eq. (1)-(5), chunks (8)-(9), options"
      " (10)-(14)"
    ),
    floats=f"H * (min(n, W) * ({kept}) + {lanes} * d_k * {columns})",
    flops=f"H * (2 * (d_k + d_v) * w + {products} * {lanes} * d_k * d_v)",
    letters=lambda n: {
      "m": spec.num_slots,
      "W": spec.window_size,
      "w": facts.tokens_seen(n, spec.window_size),
    },
  )


tensor_cache = op_lib.Op.of(
  reference,
  name="tensor_cache",
  about="""
  Tensor Cache (arXiv 2605.22884): a window beside a decayed memory.

  `y` has local attention over the window in its first value_dim numbers, and
  what the memory answers in its last value_dim. The layer `TensorCache` sets
  `unit_keys` and `unit_queries`, without which models train worse.
  """,
  forms={
    "xla_chunked": xla_chunked.chunk,
    "mosaic_tpu": dispatch.Kernel(
      "memcomp_kernels.tensor_cache.mosaic_tpu", xla_chunked.chunk
    ),
    "mosaic_gpu": dispatch.Kernel(
      "memcomp_kernels.tensor_cache.mosaic_gpu", xla_chunked.chunk
    ),
  },
  facts=_facts,
  check=reference.check,
  pass_state=over_time.strategy,
  output="batch, time, heads, 2 * value_dim",
)
