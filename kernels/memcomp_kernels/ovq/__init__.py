"""Online vector quantisation (OVQ): a growing dictionary of key-value means."""

from memcomp_kernels import op as op_lib
from memcomp_kernels.ovq import reference, tile

__all__ = ["ovq"]


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  chunk = spec.chunk_size

  def letters(n: int) -> dict[str, float]:
    starts = range(0, max(n, 1), chunk)
    return {
      "C": chunk,
      "r": spec.rows(n // chunk * chunk),
      "R": sum(map(spec.rows, starts)) / len(starts),
      "w": (chunk + 1) / 2,
    }

  return op_lib.Facts(
    objective=(
      "`|K_i - k|^2 + |V_i - v|^2`, summed over the tokens of row `i`, the row"
      " of largest `<k, K_i>`: online k-means"
    ),
    chunk=(
      f"Tokens attend to their chunk of {spec.chunk_size} exactly. A complete"
      " chunk then moves into the rows. Its tokens choose among the same rows,"
      " by a choice without a gradient."
    ),
    source=("OVQ, the baseline of arXiv 2605.09877, as in its authors' code"),
    floats="H * (r * (d_k + d_v + 1) + min(n, C) * (d_k + d_v))",
    # Reads, then the products that choose rows and the sums into them.
    flops="2 * H * (d_k + d_v) * (2 * R + w)",
    letters=letters,
  )


ovq = op_lib.Op.of(
  reference,
  name="ovq",
  about="""
  Online vector quantisation: attention over a growing dictionary of means.

  A token attends to the tokens of its chunk and to the rows of the dictionary.
  When a chunk is complete its tokens update the rows that are nearest to them,
  or become new rows. Keys have length 1, and queries come scaled.
  """,
  chunks=True,
  forms={
    "xla_chunked": tile.chunk,
  },
  facts=_facts,
)
