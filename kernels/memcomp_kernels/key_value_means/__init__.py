"""Key-Value Means: an expandable block-recurrent memory (arXiv 2605.09877)."""

import jax
import jax.numpy as jnp

from memcomp_kernels import checks, dispatch, facts, shapes
from memcomp_kernels import op as op_lib
from memcomp_kernels.key_value_means import reference, xla_chunked

__all__ = ["key_value_means"]


def capacity(spec: reference.Spec, length: int) -> int:
  """Returns the rows that a state needs for sequences of `length` tokens.

  This is at least `spec.chunk_size`, the least that a state can have.
  """
  if length < 1:
    raise ValueError(f"length={length} must be at least 1")
  live = spec.live_rows((length - 1) // spec.chunk_size)
  return max(live[-1], spec.chunk_size)


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  length: int | None = None,
  temperatures: jax.Array | None = None,
  norm_scale: jax.Array | None = None,
  norm_bias: jax.Array | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the memory's options.
    sizes: sizes and dtype of the state. `key_dim` is more than
      `spec.rotary_dim`.
    length: tokens for which the state has the rows that the budget allows. Its
      capacity caps the budget of longer sequences. Default `spec.max_length`.
    temperatures: (tau_state, tau_window), `[heads, 2]`; default ones.
    norm_scale: scale of LN_s, `[key_dim]` or `[heads, key_dim]`; default ones.
    norm_bias: bias of LN_s, `[key_dim]` or `[heads, key_dim]`; default zeros.

  Raises:
    ValueError: `rotary_dim` leaves nothing of a key, or `length` is less than
      1.
  """
  rows = capacity(spec, spec.max_length if length is None else length)
  key_dim, value_dim = sizes.key_dim, sizes.value_dim
  _check(spec, {"rows": rows, "key_dim": key_dim}, None)
  return reference.State(
    keys=sizes.filled(None, rows, key_dim),
    values=sizes.filled(None, rows, value_dim),
    radii=sizes.filled(None, rows),
    length=sizes.counts(),
    window_keys=sizes.filled(None, spec.window, key_dim),
    window_values=sizes.filled(None, spec.window, value_dim),
    window_gates=sizes.filled(None, spec.window),
    position=sizes.counts(),
    temperatures=sizes.filled(temperatures, 2, default=1.0),
    norm_scale=sizes.filled(norm_scale, key_dim, default=1.0),
    norm_bias=sizes.filled(norm_bias, key_dim),
    segment_id=sizes.counts(),
  )


def resize(state: reference.State, capacity: int) -> reference.State:
  """Changes the capacity of a state, between two calls.

  Args:
    state: any state.
    capacity: the new number of rows, into which live rows must fit. If `state`
      is traced, their number is unknown, and rows that do not fit are lost.

  Raises:
    ValueError: live rows do not fit.
  """
  live = checks.greatest(state.length)
  if live is not None and live > capacity:
    raise ValueError(
      f"capacity={capacity} must be at least {live}, the rows that are live"
    )

  def fit(x):
    missing = max(capacity - x.shape[2], 0)
    padding = [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)
    return jnp.pad(x[:, :, :capacity], padding)

  return state._replace(
    keys=fit(state.keys), values=fit(state.values), radii=fit(state.radii)
  )


def _fresh(spec: reference.Spec, state: reference.State) -> reference.State:
  """Returns a fresh state with the capacity of `state`."""
  del spec
  return jax.tree.map(jnp.zeros_like, state)


def _check(spec, sizes, state):
  del state
  rows, key_dim = sizes.get("rows", spec.chunk_size), sizes["key_dim"]
  if rows < spec.chunk_size:
    raise ValueError(
      f"key_value_means: the state has {rows} rows, the first chunk alone needs"
      f" chunk_size={spec.chunk_size}"
    )
  if spec.rotary_dim >= key_dim:
    raise ValueError(
      f"key_value_means: rotary_dim={spec.rotary_dim} must be less than the"
      f" {key_dim} channels of a key: nothing would be left of it in the memory"
    )


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""

  def letters(n: int) -> dict[str, float]:
    chunk = spec.chunk_size
    chunks = max(1, -(-n // chunk))
    rows = spec.live_rows(chunks - 1)
    return {
      "W": spec.window,
      "r": rows[-1],
      "R": sum(rows) / chunks,
      "w": facts.tokens_seen(n, spec.window, chunk),
    }

  return op_lib.Facts(
    objective=(
      "None by gradient: a token joins the row of largest `<kbar, LN(K_i)>`."
      " `kbar` is the normalised key without its rotary channels"
    ),
    chunk=(
      f"The window has {spec.window_chunks} chunks of {spec.chunk_size} tokens."
      " When a chunk begins, the oldest one moves into the rows. Its"
      " tokens choose among the same rows, by a choice without a gradient."
    ),
    source=(
      "Key-Value Means, arXiv 2605.09877 v3, eq. (1)-(4), Append, Merge,"
      " Readout"
    ),
    floats="H * (r + min(n, W)) * (d_k + d_v + 1)",
    # Reads of both, then scores against the rows and sums into them.
    flops="2 * H * (d_k + d_v) * (2 * R + w)",
    letters=letters,
  )


key_value_means = op_lib.Op.of(
  reference,
  name="key_value_means",
  about="""
  Key-Value Means (arXiv 2605.09877): an expandable block-recurrent memory.

  A token attends to a window of the newest chunks, and to rows that are means
  of older keys and values. The budget says how many rows there are after how
  many tokens. A fresh state has room for `length` tokens, by default
  `max_length`.
  """,
  forms={
    "xla_chunked": xla_chunked.chunk,
    "mosaic_tpu": dispatch.Kernel(
      "memcomp_kernels.key_value_means.pallas_tpu.engine", xla_chunked.chunk
    ),
  },
  facts=_facts,
  make_state=_make_state,
  fresh=_fresh,
  constants=("temperatures", "norm_scale", "norm_bias"),
  check=_check,
)
