"""The contract of every memory: states, inputs, packing, precision.

A memory is four functions over its own `Spec`, `Inputs` and `State`:

  init_state(spec, *, batch, heads, key_dim, value_dim, dtype)    -> State
  step(state, inputs, *, spec)                                    -> (State, y)
  reference(state, inputs, *, spec, ...)                          -> (State, y)
  chunk(state, inputs, *, spec, implementation, ...)              -> (State, y)

`step` is the body of a `lax.scan`; its arrays `[batch, heads, dim]` have no
time axis. `reference` is the scan of `step`, with time moved to axis 1. `chunk`
computes the same function fast; see `Op.chunk` for its other arguments.

`State` and `Inputs` are NamedTuples. Every leaf of a `State` has the batch
axis first. A field may be None where a Spec does not need it. Every `State`
has `segment_id` `[batch]` int32, the segment that the state belongs to. It is 0
as long as the state has seen no token.

Packing. `segment_ids` `[batch, time]` int32 alone decides where segments are.
Where it is 0 (padding), the state does not change and the output is zero. Where
it differs from the state's `segment_id` (and that is not 0), the token starts
from `reset_state`. This is an exact select, so nothing of the earlier state
remains. `reset_state` must be given with `segment_ids`. It is a state, or
`FRESH` for what `init_state` gives. It may be left out only where
`max_position=0` says that the state passed in is fresh; new segments then start
from that state. Without `segment_ids` all tokens belong to the state's current
segment.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Fresh(enum.Enum):
  """The type of `FRESH`."""

  FRESH = "fresh"


FRESH: Final = Fresh.FRESH
"""Value of `reset_state`: new segments start from what `init_state` gives."""

einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""`jnp.einsum` that does not round float32 to bfloat16, a TPU's default.

Definitions use it, and choices that rounding would change.
"""


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
  """Applies JAX's default promotion of dtypes and ranks inside the context.

  A program may forbid promotion for its own arrays
  (`jax_numpy_dtype_promotion=strict`, `jax_numpy_rank_promotion=raise`). Such a
  setting must not break the memories, whose code relies on the defaults.
  """
  with (
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
  ):
    yield


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
  """Returns the dtype of states and sums: float32, or wider if an input is."""
  return jnp.result_type(jnp.float32, *arrays)


def product(equation: str, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
  """Multiplies operands cast to `dtype`, and sums in float32 or wider."""
  # bfloat16 operands take one pass of a matrix unit. A TPU would by default
  # round float32 operands to bfloat16, so they ask for the highest precision.
  precision = (
    lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
  )
  return jnp.einsum(
    equation,
    a.astype(dtype),
    b.astype(dtype),
    precision=precision,
    preferred_element_type=jnp.promote_types(dtype, jnp.float32),
  )


def one_width(call: Any) -> Any:
  """Widens float16, and every float where something of the call is float64.

  float16 becomes float32, as its range is too small for states. bfloat16 stays
  beside float32, because products are computed in it.
  """
  wide = accumulation_dtype(*jax.tree.leaves(call))
  narrow = [jnp.float16, jnp.float32]
  if wide == jnp.float64:
    narrow.append(jnp.bfloat16)
  return jax.tree.map(
    lambda x: x.astype(wide) if x.dtype in narrow else x, call
  )


def varying(tree: Any) -> frozenset[str]:
  """Returns the mesh axes of a `shard_map` over which any of the arrays varies.

  It is empty outside of one, and with `check_vma=False`.
  """
  types = map(jax.typeof, jax.tree.leaves(tree))
  return frozenset().union(*(x.manual_axis_type.varying for x in types))


def vary_like(tree: Any, given: Any) -> Any:
  """Marks arrays in a `shard_map` as varying over the mesh axes of others.

  Scans require that their carry varies as their inputs do, and a fresh state
  does not.
  """
  over = varying(given)

  def one(leaf):
    missing = tuple(over - varying(leaf))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(one, tree)


def like(state: Any, given: Any) -> Any:
  """Returns a new state with the dtypes of the one that was given."""
  return jax.tree.map(lambda x, own: x.astype(own.dtype), state, given)


def own_buffers(state: Any, held: Any) -> Any:
  """Gives each array of a state a buffer of its own, as donation requires.

  Args:
    state: the state, whose arrays may share buffers.
    held: arrays that must not share a buffer with it either.
  """
  seen = set(map(id, jax.tree.leaves(held)))

  def own(x):
    again = id(x) in seen and not isinstance(x, jax.core.Tracer)
    seen.add(id(x))
    return jnp.copy(x) if again else x

  return jax.tree.map(own, state)


def check_state_dtype(dtype: Any) -> None:
  """Raises ValueError if states would be narrower than float32."""
  try:
    kind = jnp.dtype(dtype if dtype is not None else "")
  except TypeError:
    raise ValueError(f"dtype={dtype!r} is no dtype: float32 or wider") from None
  if not jnp.issubdtype(kind, jnp.floating) or jnp.finfo(kind).bits < 32:
    raise ValueError(f"dtype={kind}: states need at least float32")


def check_reset(
  name: str,
  segment_ids: jax.Array | None,
  reset_state: Any,
  max_position: int | None,
) -> None:
  """Raises ValueError if it is unknown what new segments start from.

  Args:
    name: name of the op, for the error.
    segment_ids: segment ids of the call, or None.
    reset_state: reset state of the call, or None.
    max_position: bound given by the call. 0 means that the state is fresh, so
      that new segments also start from it.
  """
  if segment_ids is not None and reset_state is None and max_position != 0:
    raise ValueError(
      f"{name}: segment_ids with a state need reset_state, what new segments"
      " start from: memcomp_kernels.FRESH, or a state"
    )


def batched_where(condition: jax.Array, x: Any, y: Any) -> Any:
  """Selects whole rows from two equal pytrees; `condition` is `[batch]`."""

  def select(a, b):
    return jnp.where(expand(condition, a), a, b)

  return jax.tree.map(select, x, y)


def expand(x: jax.Array, like: jax.Array) -> jax.Array:
  """Appends axes of size one to x, up to the rank of `like`."""
  return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def pad_time(x: jax.Array, multiple: int, fill: Any = 0) -> jax.Array:
  """Pads `[batch, time, ...]` with `fill` up to a multiple of tokens."""
  missing = -x.shape[1] % multiple
  if not missing:
    return x
  widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, widths, constant_values=fill)


def cut_time(x: jax.Array, size: int, fill: Any = 0) -> jax.Array:
  """Cuts `[batch, time, ...]` into `[pieces, batch, size, ...]`, padded."""
  x = pad_time(x, size, fill)
  x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Gathers x along axis 1 by `index`; zeros where it is out of range."""
  return jnp.take_along_axis(
    x, expand(index, x), axis=1, mode="fill", fill_value=0
  )


def segment_starts(
  segment_ids: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Finds where segments start.

  Args:
    segment_ids: `[batch, time]`; 0 is padding.
    before: `[batch]`, the state's `segment_id`.

  Returns:
    starts: bool `[batch, time]`, true at a token whose segment differs from
      that of the real token before it (or of the state).
    last: int32 `[batch]`, the `segment_id` after the last token.
  """
  time = segment_ids.shape[1]
  valid = segment_ids != 0
  if not time:
    return valid, before
  # Index of the latest real token up to each position, or -1 if there is none.
  index = jnp.where(valid, jnp.arange(time), -1)
  latest = lax.cummax(index, axis=1)
  previous = jnp.concatenate(
    [jnp.full_like(latest[:, :1], -1), latest[:, :-1]], axis=1
  )

  def id_at(i):
    found = jnp.take_along_axis(segment_ids, jnp.maximum(i, 0), axis=1)
    return jnp.where(i >= 0, found, before[:, None])

  previous_id = id_at(previous)
  starts = valid & (previous_id != 0) & (previous_id != segment_ids)
  return starts, id_at(latest[:, -1:])[:, 0]


def token_positions(
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  position: jax.Array,
  time: int,
  reset_position: jax.Array | int = 0,
) -> jax.Array:
  """Returns each token's position in its segment, int32 `[batch, time]`.

  Args:
    segment_ids: `[batch, time]`; 0 is padding, whose positions have no meaning.
      None means that all tokens continue the state's segment.
    segment_id: `[batch]`, the segment of the state.
    position: `[batch]`, tokens of that segment before this call.
    time: tokens per row.
    reset_position: `[batch]` or int, tokens that new segments have before their
      first.
  """
  if segment_ids is None:
    return position[:, None] + jnp.arange(time, dtype=jnp.int32)
  starts, _ = segment_starts(segment_ids, segment_id)
  rank = jnp.cumsum(segment_ids != 0, axis=1, dtype=jnp.int32) - 1
  # Rank of the current segment's first token; -1 for the segment of the state.
  first = lax.cummax(jnp.where(starts, rank, -1), axis=1)
  before = jnp.broadcast_to(reset_position, position.shape)[:, None] - first
  return rank + jnp.where(first < 0, position[:, None], before)


def read_scale(spec: Any, key_dim: int) -> float:
  """Returns `spec.scale`, the factor of reads; None is 1 / sqrt(key_dim)."""
  return key_dim**-0.5 if spec.scale is None else spec.scale


class MatrixState(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  It is the `State` of memories that are one matrix per head.

  Attributes:
    memory: the matrix.
    segment_id: the current segment, 0 before any token.
  """

  memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def next_segment_id(segment_id: jax.Array) -> jax.Array:
  """Returns the `segment_id` after tokens that came without `segment_ids`."""
  return jnp.where(segment_id == 0, 1, segment_id)


def packed_step(
  step: Callable[[Any, Any], tuple[Any, jax.Array]],
  state: Any,
  inputs: Any,
  segment_id: jax.Array,
  reset_state: Any,
) -> tuple[Any, jax.Array]:
  """Runs one step under the packing rules; `segment_id` is `[batch]`."""
  valid = segment_id != 0
  starts = valid & (state.segment_id != 0) & (state.segment_id != segment_id)
  state = batched_where(starts, reset_state, state)
  new_state, output = step(state, inputs)
  new_state = new_state._replace(segment_id=segment_id)
  new_state = batched_where(valid, new_state, state)
  return new_state, batched_where(valid, output, jnp.zeros_like(output))


def scan(
  step: Callable[..., tuple[Any, jax.Array]],
  call: Any,
  *,
  block: int | None = None,
) -> tuple[Any, jax.Array]:
  """Scans `step` over time, as every memory's `reference` does.

  Args:
    step: (state, inputs without time, *, spec) -> (state, output without time).
    call: the `dispatch.Call`.
    block: if given, the scan is checkpointed every `block` tokens, so that
      its gradient stores time / block states instead of time. It never changes
      the result.

  Returns:
    The state after the last token, and outputs `[batch, time, ...]`.
  """
  step = functools.partial(step, spec=call.spec)

  def body(state, x):
    inputs, segment_id = x
    if segment_id is None:
      return step(state, inputs)
    return packed_step(step, state, inputs, segment_id, call.reset)

  xs = call.inputs, call.segment_ids
  xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs)
  state = call.state
  time = jax.tree.leaves(xs)[0].shape[0]
  if block is None or block >= time:
    state, outputs = lax.scan(body, state, xs)
    return state, jnp.moveaxis(outputs, 0, 1)

  whole = time // block * block

  @jax.checkpoint
  def blocks(state, xs):
    return lax.scan(body, state, xs)

  head = jax.tree.map(lambda x: x[:whole].reshape(-1, block, *x.shape[1:]), xs)
  state, outputs = lax.scan(blocks, state, head)
  outputs = outputs.reshape(whole, *outputs.shape[2:])
  if whole < time:
    state, rest = blocks(state, jax.tree.map(lambda x: x[whole:], xs))
    outputs = jnp.concatenate([outputs, rest])
  return state, jnp.moveaxis(outputs, 0, 1)


def wrong_dtypes(inputs: Any, *names: str) -> str | None:
  """Says why query, key and value do not share an allowed dtype, or None."""
  dtypes = {x.dtype for x in (inputs.query, inputs.key, inputs.value)}
  if len(dtypes) > 1 or not dtypes <= {jnp.dtype(name) for name in names}:
    found = ", ".join(sorted(map(str, dtypes)))
    widened = " (float16 is computed in float32)" * ("float32" in found)
    return (
      f"query, key and value must all be {' or '.join(names)}, not"
      f" {found}{widened}"
    )
  return None
