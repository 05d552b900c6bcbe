"""Test-time training in words."""

from memcomp_kernels import summaries
from memcomp_kernels.test_time_training import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  if spec.model == "linear":
    name, model = "TTT-Linear", "x W + b"
    exact = "by substitution"
    floats = "H * d_k * (d_k + 1)"
    flops = "H * (6 * d_k**2 + 4 * C * d_k)"
  else:
    name, model = "TTT-MLP", "gelu(x W_1 + b_1) W_2 + b_2"
    exact = "token by token over the tile's rows"
    floats = "H * d_k * (2 * e * d_k + e + 1)"
    flops = "H * (14 * e * d_k**2 + 4 * (1 + e) * C * d_k)"
  return summaries.Summary(
    objective=f"`l(W) = |f(k; W) - v|^2 / 2`, `f(x; W) = x + LN({model})`",
    update=(
      "`A <- A - eta grad l(W')`, `W = W' + c (A - W')`, `c` about `1 / j` at a"
      " chunk's token `j`, or 1; `y = f(q; W)`"
    ),
    chunk=(
      f"gradients at `W'`, the weights before a chunk of {spec.chunk_size}"
      " tokens, and `A = W'` there; `gradient_at=token`: at the weights before"
      f" the token, `c = 1`, exact at any tile, {exact}"
    ),
    source=(
      f"{name}, arXiv 2407.04620, eq. (4)-(6), section 2.7; `c` as released"
    ),
    floats=floats,
    flops=flops,
  )
