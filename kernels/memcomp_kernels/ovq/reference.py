"""Online vector quantisation token by token.

  y_t = sum_j p_{t,j} v_j + sum_i p_{t,i} V_i
  p_t = softmax over both of <q_t, k_j>, j of the current chunk up to t, and
        <q_t, K_i> + log c_i, i of the rows in use

K, V, c are the dictionary's keys, values and counts. When a chunk is complete,
its tokens join the dictionary (`dictionary.update`) and the chunk is empty
again.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import at_least, at_most, one_of, option, options
from memcomp_kernels.ovq import dictionary as dictionary_lib

GROWTHS = ("plateau", "linear")


_MOST_ROWS = 46_340
"""Its square is an int32; see `Spec.rows`."""


@options
class Spec:
  """The options of an OVQ memory; changing a field changes the function.

  Attributes:
    chunk_size: number of tokens that are attended to exactly before they join
      the dictionary together, >= 1.
    max_rows: N, maximum number of rows of the dictionary, in [1, 46340]; at
      least 2 with growth "plateau".
    growth: rows after t tokens, "plateau" floor(t N / (t + N)), or "linear"
      min(t, N).
    count_bias: whether the log of a row's count is added to its scores, so that
      a row weighs as much as the tokens in it.
    normalize_rows: whether rows, keys as well as values, have length 1 after
      every update.
  """

  chunk_size: int = option(256, at_least(1))
  max_rows: int = option(1024, at_least(1), at_most(_MOST_ROWS))
  growth: str = option("plateau", one_of(GROWTHS))
  count_bias: bool = True
  normalize_rows: bool = False

  def __post_init__(self):
    if self.max_rows == 1 and self.growth == "plateau":
      raise ValueError(
        'max_rows=1 never has a row with growth="plateau": give 2 or more, or'
        ' growth="linear"'
      )

  def rows(self, tokens):
    """Returns the rows in use after `tokens` >= 0 (an int, or an array)."""
    if self.growth == "plateau":
      # t N / (t + N) = N - N^2 / (t + N), whose terms do not grow with t.
      return self.max_rows - -(-(self.max_rows**2) // (tokens + self.max_rows))
    less = tokens < self.max_rows
    return less * tokens + (1 - less) * self.max_rows


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: scaled query; scores are plain products with it.
    key: key of length 1. A token joins the row with which its key has the
      largest product.
    value: the value to keep.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    keys: keys of the dictionary.
    values: values of the dictionary.
    counts: number of tokens in each row, in the same dtype. Their sum is the
      number of tokens in the dictionary.
    pending_keys: keys of the current chunk's tokens, zero after the last.
    pending_values: values of the current chunk's tokens, zero after the last.
    position: tokens of the current chunk, in [0, chunk_size).
    segment_id: the current segment, 0 before any token.
  """

  keys: Annotated[jax.Array, "batch heads max_rows key_dim"]
  values: Annotated[jax.Array, "batch heads max_rows value_dim"]
  counts: Annotated[jax.Array, "batch heads max_rows"]
  pending_keys: Annotated[jax.Array, "batch heads chunk_size key_dim"]
  pending_values: Annotated[jax.Array, "batch heads chunk_size value_dim"]
  position: Annotated[jax.Array, "batch", "int32"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Adds a token to the chunk, attends, stores whole chunks; see `Op.step`."""
  dtype = state.keys.dtype
  q, k, v = (x.astype(dtype) for x in inputs)
  place = jnp.arange(spec.chunk_size)
  here = (place == state.position[:, None])[:, None, :, None]
  keys = jnp.where(here, k[:, :, None], state.pending_keys)
  values = jnp.where(here, v[:, :, None], state.pending_values)
  D = dictionary_lib.Dictionary(state.keys, state.values, state.counts)

  seen = place <= state.position[:, None]
  of_chunk = einsum("bhk,bhjk->bhj", q, keys)
  of_chunk = jnp.where(seen[:, None], of_chunk, -jnp.inf)
  of_rows = einsum("bhk,bhik->bhi", q, D.keys)
  of_rows = of_rows + dictionary_lib.log_counts(D.counts, spec)
  p = jax.nn.softmax(jnp.concatenate([of_rows, of_chunk], -1), axis=-1)
  y = einsum("bhj,bhjv->bhv", p, jnp.concatenate([D.values, values], 2))

  position = (state.position + 1) % spec.chunk_size
  whole = position == 0
  D = contract.batched_where(
    whole, dictionary_lib.update(D, keys, values, spec), D
  )
  keys, values = contract.batched_where(
    whole, jax.tree.map(jnp.zeros_like, (keys, values)), (keys, values)
  )
  segment_id = contract.next_segment_id(state.segment_id)
  state = State(D.keys, D.values, D.counts, keys, values, position, segment_id)
  return state, y.astype(inputs.query.dtype)
