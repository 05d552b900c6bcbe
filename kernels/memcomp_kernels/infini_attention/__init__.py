"""Infini-attention (arXiv 2404.07143): local attention and linear memory."""

from memcomp_kernels import facts
from memcomp_kernels import op as op_lib
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.infini_attention import reference, tile

__all__ = ["infini_attention"]


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  size, products = spec.segment_size, {"linear": 4, "delta": 6}[spec.rule]

  def letters(n: int) -> dict[str, float]:
    if spec.window_size:
      return {"W": spec.window, "w": facts.tokens_seen(n, spec.window)}
    whole, rest = divmod(n, size)
    pairs = whole * size * (size + 1) + rest * (rest + 1)
    return {"C": size, "w": pairs / (2 * n) if n else 0.0}

  return op_lib.Facts(
    objective=(
      "`|sigma(k) M' / d - v|^2 / 2`, `d = sigma(k) z' + eps` held fixed, at"
      " rate `d`; `rule=linear`: `-<sigma(k) M, v>`"
    ),
    chunk=(
      "Tokens read and correct `M'`, `z'`, the memory before their segment of"
      f" {spec.segment_size} tokens, and attend within it. With"
      " `segment_size=1` it is the memory before the token: exact at any tile."
    ),
    source="Infini-attention, arXiv 2404.07143, eq. (3)-(6)",
    floats=(
      f"H * (min(n, {'W' if spec.window_size else 'C'}) * (d_k + d_v)"
      " + d_k * (d_v + 1))"
    ),
    flops=f"H * (2 * (d_k + d_v) * w + {products} * d_k * d_v)",
    letters=letters,
  )


infini_attention = op_lib.Op.of(
  reference,
  name="infini_attention",
  about="""
  Infini-attention (arXiv 2404.07143): local attention beside a linear memory.

  A token reads softmax attention over its segment (or a window), and the memory
  of all segments before. `read_gate` mixes the two.
  """,
  forms={
    "xla_chunked": tile.chunk,
  },
  facts=_facts,
  Tiling=form_lib.Tiling,
)
