"""Checks of a layer's arguments, one line for each mistake."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import shapes
from memcomp_kernels.options import kind


def check_state(layer: Any, rows: int, state: Any) -> None:
  """Raises TypeError if there is no state."""
  if state is None:
    raise TypeError(
      f"{type(layer).__name__}: state is missing; make the first by"
      f" init_state({rows})"
    )


def check_arrays(layer: Any, needed: str, **given: Any) -> None:
  """Raises TypeError for what is no array; all but `needed` may be None."""
  for name, x in given.items():
    if not hasattr(x, "ndim") and (x is not None or name == needed):
      raise TypeError(
        f"{type(layer).__name__}: {name} is of type {kind(x)}, expected an"
        " array"
      )


def check(
  layer: Any,
  x: jax.Array,
  axes: str,
  state: Any = None,
  segment_ids: jax.Array | None = None,
  first_value: jax.Array | None = None,
) -> None:
  """Checks the arguments of a call of a mixer or of its step.

  Args:
    layer: the mixer.
    x: the input.
    axes: names of its axes but the last, which is d_model.
    state: the state before x, or None.
    segment_ids: of packed rows, or None.
    first_value: values of the first layer, or None; of any width here.

  Raises:
    TypeError: x is not an array, or `state` is not a state of such a layer.
    ValueError: x has the wrong rank, width or dtype, or another argument does
      not fit x.
  """
  name = type(layer).__name__
  check_arrays(
    layer, "x", x=x, segment_ids=segment_ids, first_value=first_value
  )
  if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits < 16:
    raise ValueError(
      f"{name}: x has dtype {x.dtype}, expected a floating dtype; embed tokens"
      " first"
    )
  if x.ndim != len(axes.split(", ")) + 1 or x.shape[-1] != layer.d_model:
    raise ValueError(
      f"{name}: x has shape {x.shape}, expected [{axes},"
      f" d_model={layer.d_model}]"
    )
  if segment_ids is not None and segment_ids.shape != x.shape[:2]:
    raise ValueError(
      f"{name}: segment_ids has shape {segment_ids.shape}, expected"
      f" {x.shape[:2]}, as x"
    )
  if first_value is not None and first_value.shape[:-1] != x.shape[:-1]:
    raise ValueError(
      f"{name}: first_value has shape {first_value.shape}, expected [{axes},"
      f" width] as x, whose shape is {x.shape}"
    )
  if state is None:
    return
  fresh = jax.eval_shape(lambda: layer.fresh_state(x.shape[0]))
  # The state of linear attention is the memory itself.
  whole = isinstance(fresh, layer.op.State)
  memory = state if whole else getattr(state, "memory", None)
  if not isinstance(memory, layer.op.State):
    raise TypeError(
      f"{name}: state is of type"
      f" {kind(state if memory is None else memory)}; make it by"
      f" init_state({x.shape[0]})"
    )
  rows = memory.segment_id.shape[0]
  if rows != x.shape[0]:
    raise ValueError(
      f"{name}: state has {rows} rows, x has {x.shape[0]}; make it by"
      f" init_state({x.shape[0]})"
    )
  if whole:
    _check_memory(layer, rows, memory, fresh, "state.")
  else:
    _check_beside_memory(name, rows, state, fresh)
    _check_memory(layer, rows, memory, fresh.memory, "state.memory.")


def check_width(first_value: jax.Array, width: int) -> None:
  """Raises ValueError if values of the first layer have another width."""
  if first_value.shape[-1] != width:
    raise ValueError(
      f"first_value has width {first_value.shape[-1]}, expected {width}; it is"
      " what `value_of` of the first layer returns"
    )


def _check_beside_memory(name: str, rows: int, state: Any, fresh: Any) -> None:
  """Raises ValueError if a part of the state is not of this layer's size."""
  given, expected = (
    {
      jax.tree_util.keystr(path): leaf.shape
      for path, leaf in jax.tree.leaves_with_path(x._replace(memory=None))
    }
    for x in (state, fresh)
  )
  for part in given | expected:
    shape, own = given.get(part), expected.get(part)
    if shape != own:
      raise ValueError(
        f"{name}: state{part} has shape {shape}, expected {own}; make it by"
        f" this layer's init_state({rows})"
      )


def _check_memory(
  layer: Any, rows: int, memory: Any, fresh: Any, label: str
) -> None:
  """Raises ValueError if the memory has other heads or widths.

  Its other sizes may depend on the length of the text; the op checks them.
  """
  check = shapes.Check(type(layer).__name__, layer.spec)
  check.arrays(fresh)
  check.sizes = {x: n for x, n in check.sizes.items() if x in shapes.SIZES}
  try:
    check.arrays(memory, label)
  except ValueError as error:
    fix = f"make it by this layer's init_state({rows})"
    cause = str(error).removesuffix("; make the state with the same spec")
    raise ValueError(f"{cause}; {fix}") from error
