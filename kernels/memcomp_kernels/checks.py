"""Checks of a call's arguments beside those of shapes, which `shapes` does.

Each takes the `op.Op` and raises one line that names the argument and the fix.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from memcomp_kernels import contract, shapes
from memcomp_kernels.options import is_a, kind

_GREATEST = 2**31 - 1


def kinds(op: Any, **arguments: Any) -> None:
  """Raises TypeError if an argument is not of the op's own type."""
  for name, x in arguments.items():
    expected, make = {
      "inputs": (op.Inputs, "Inputs(...)"),
      "spec": (op.Spec, "Spec(...)"),
      "tiling": (op.Tiling, "Tiling(...)"),
    }.get(name, (op.State, "init_state(...)"))
    if expected is None:
      raise TypeError(f"{op.name}: it has no {name}; leave it out")
    if not isinstance(x, expected):
      raise TypeError(
        f"{op.name}: {name} is of type {kind(x)}; make it by {op.name}.{make}"
      )


def sizes(op: Any, given: Mapping[str, Any]) -> None:
  """Raises an error if an argument of `init_state` is unknown or no count.

  Batch, heads and the sizes of the state's arrays must be given.
  """
  counts = [
    name for name, x in op.options.items() if x.annotation == int | None
  ]
  known = dict.fromkeys((*shapes.SIZES, *op.options))
  for name, x in given.items():
    if name not in known:
      raise TypeError(
        f"{op.name}: init_state has no argument {name!r}; beside spec and dtype"
        f" it takes {', '.join(known)}"
      )
    if x is not None and name in (*shapes.SIZES, *counts):
      count(op.name, name, x)
  axes = {axis for x in shapes.fields(op.State).values() for axis in x.axes}
  for name in shapes.SIZES:
    if given.get(name) is None and name in {"batch", "heads"} | axes:
      raise ValueError(f"{op.name}: {name} is missing")


def count(owner: str, name: str, x: Any) -> None:
  """Raises ValueError if `x`, which `owner` calls `name`, is not a count."""
  # A program for any batch, by `jax.export`, has a symbol for its size.
  if not export.is_symbolic_dim(x) and (not is_a(x, int) or x < 0):
    raise ValueError(f"{owner}: {name}={x!r} must be an integer, 0 or more")


def array(op: Any, name: str, x: Any) -> jax.Array:
  """Converts x to a JAX array; raises TypeError if that is impossible."""
  try:
    if not isinstance(x, str):  # of which JAX only warns
      return jnp.asarray(x)
  except (TypeError, ValueError):
    pass
  raise TypeError(
    f"{op.name}: {name} is of type {kind(x)}, expected an array of numbers"
  )


def segment_ids(op: Any, ids: Any) -> jax.Array:
  """Converts segment ids to int32.

  Raises ValueError if they are not integers from 0 to 2**31 - 1.
  """
  if isinstance(ids, (list, tuple)):
    with contextlib.suppress(ValueError):  # of uneven rows
      ids = np.array(ids)
  if hasattr(ids, "dtype") and _readable(ids):
    numbers = np.asarray(ids)  # jnp would trace its minimum
    low, high = numbers.min(), numbers.max()
    if not 0 <= low <= high <= _GREATEST:
      raise ValueError(
        f"{op.name}: segment_ids has numbers from {low} to {high}, expected 0"
        f" to {_GREATEST}: number documents from 1 on; 0 is padding"
      )
  ids = array(op, "segment_ids", ids)
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise ValueError(
      f"{op.name}: segment_ids has dtype {ids.dtype}, expected an integer dtype"
    )
  return ids.astype(jnp.int32)


def position(
  op: Any, max_position: int | None, state: Any, name: str = "state"
) -> None:
  """Raises ValueError if `max_position` is known to be too low for a state."""
  if max_position is None:
    return
  count(op.name, "max_position", max_position)
  read = None if op.chunks else _greatest_position(state)
  if read is not None and read > max_position:
    raise ValueError(
      f"{op.name}: {name} has seen {read} tokens, more than the given bound,"
      f" max_position={max_position}"
    )


def fresh(op: Any, state: Any) -> None:
  """Raises ValueError if a state is known not to be fresh."""
  if greatest(state.segment_id != 0):
    raise ValueError(
      f"{op.name}: max_position=0 says that the state is fresh, but it has seen"
      " tokens; give reset_state"
    )


def chunk_position(op: Any, spec: Any, state: Any, name: str = "state") -> None:
  """Raises ValueError if a state is known to be of a longer chunk."""
  read = _greatest_position(state) if op.chunks else None
  if read is not None and read >= spec.chunk_size:
    raise ValueError(
      f"{op.name}: {name} is {read} tokens into its chunk, and"
      f" chunk_size={spec.chunk_size}; give the spec that made it"
    )


def room(
  op: Any,
  state: Any,
  spec: Any,
  check: shapes.Check,
  segment_ids: Any,
  reset_state: Any,
) -> None:
  """Raises ValueError if a state is known to have no room for all tokens.

  Only direct calls check this: they make states as long as their own tokens,
  see `Op.room`. With a window old tokens are dropped on purpose.
  """
  if not op.room or getattr(spec, "window_size", None) is not None:
    return
  time, read = check.sizes["time"], greatest(state.position)
  if not isinstance(time, int):  # symbolic
    return
  held = "" if read is None else f" and holds {read}"
  needed, what = time + (read or 0), f"{time} more need"
  if segment_ids is not None:
    what, before = "a segment needs", 0
    if reset_state is not None and reset_state is not contract.FRESH:
      kinds(op, reset_state=reset_state)
      check.arrays(reset_state, label="reset_state.", floats=32)
      if greatest(reset_state.position) is not None:
        before = reset_state.position
    positions = contract.token_positions(
      segment_ids, state.segment_id, state.position, time, before
    )
    needed = greatest(jnp.where(segment_ids != 0, positions + 1, 0)) or 0
  for option in op.room:
    size = check.sizes[option]
    if needed > size:
      raise ValueError(
        f"{op.name}: the state has room for {size} tokens{held}; {what}"
        f" {option}={needed} in the first call"
      )


def lengths(op: Any, sizes: shapes.Sizes, options: Any) -> dict[str, int]:
  """Returns the room that a direct call gives a fresh state; see `Op.room`.

  Not that which `options` of the call give.
  """
  found = {}
  for option, axis in op.room.items():
    if option in options:
      continue
    if not isinstance(sizes[axis], int):
      raise ValueError(
        f"{op.name}: {axis}={sizes[axis]} is symbolic, and a fresh state has"
        f" room for a number of tokens; pass {option}= or a state"
      )
    found[option] = max(1, sizes[axis])
  return found


def _greatest_position(state: Any) -> int | None:
  """Returns the greatest position of a state's rows, or None if unknown."""
  counts = getattr(state, "position", None)
  return None if counts is None else greatest(counts)


def greatest(counts: jax.Array) -> int | None:
  """Returns the greatest count, or None if this process cannot read them."""
  return int(np.asarray(counts).max()) if _readable(counts) else None


def _readable(x: Any) -> bool:
  """Whether this process can read numbers of x, and there are some."""
  if isinstance(x, jax.core.Tracer) or not x.size:
    return False
  return not isinstance(x, jax.Array) or x.is_fully_addressable
