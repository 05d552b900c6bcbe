"""Says where a TPU kernel can run, and runs it over a grid, within its VMEM.

Operands, results and scratch are dictionaries of pytrees. An entry that is None
has no block, and the kernel gets None for it.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels import contract, dispatch
from memcomp_kernels.pallas_tpu import LANES

LIMIT = 64 * 2**20
"""Bytes that a kernel may use; v5e and v6e have 128 MiB, v5p has 64 MiB."""

Named = Mapping[str, Any]

_MODE: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "mosaic_tpu", default=None
)
# A list gets the bytes of each kernel, which then does not run.
_NEEDED: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar(
  "mosaic_tpu_needed", default=None
)


@contextlib.contextmanager
def interpreted(**params) -> Iterator[None]:
  """Context in which kernels run in the interpreter, on any platform.

  Args:
    **params: Arguments of `pltpu.InterpretParams`, such as detect_races=True.
  """
  token = _MODE.set(pltpu.InterpretParams(**params))
  try:
    yield
  finally:
    _MODE.reset(token)


@contextlib.contextmanager
def compiled(kind: str | None = None) -> Iterator[None]:
  """Context in which kernels are lowered for TPUs, on any devices.

  Args:
    kind: Kind of TPU that kernels are lowered for, such as "v5e"; None for any.
  """
  token = _MODE.set(("compile", kind))
  try:
    yield
  finally:
    _MODE.reset(token)


def interpret() -> Any:
  """Returns the `interpret` argument for a `pallas_call` in this context."""
  mode = _MODE.get()
  return False if mode is None or isinstance(mode, tuple) else mode


def device_kind() -> str | None:
  """Returns the TPU kind that kernels are for, such as "v5e", or None.

  None means that the kind is unknown.
  """
  mode = _MODE.get()
  if isinstance(mode, tuple):
    return mode[1]
  names = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
  return names.get(dispatch.current_device_kind())


def unavailable() -> str | None:
  """Returns why kernels cannot run here, or None if they can."""
  platform = dispatch.current_platform()
  if _MODE.get() is None and platform != "tpu":
    return f"it is a TPU kernel, and the devices in use are of {platform}"
  return None


def num_bytes(arrays: Named, specs: Named, scratch: Named) -> int:
  """Returns the bytes of a kernel's blocks (two buffers each) and scratch.

  Rows fill whole registers, so their lanes count up to a multiple of 128.

  Args:
    arrays: Arrays or their shapes, by name.
    specs: Block specs of the arrays.
    scratch: Memory references.
  """
  size = 0
  blocks = zip(_flat(arrays), _flat({k: specs[k] for k in arrays}), strict=True)
  for array, spec in blocks:
    size += 2 * _padded(spec.block_shape) * array.dtype.itemsize
  for reference in _flat(scratch):
    size += _padded(reference.shape) * reference.dtype.itemsize
  return size


def _padded(shape: tuple[int, ...]) -> int:
  """Returns the number of elements, with the last axis in whole registers."""
  return math.prod(shape[:-1]) * -(-shape[-1] // LANES) * LANES


def needed(call: Callable[..., Any], *arguments: Any, **named: Any) -> int:
  """Returns the bytes of the largest kernel that a call runs.

  The call is traced without its kernels.

  Args:
    call: A function that calls `run`.
    *arguments: Its arguments, arrays or their shapes.
    **named: More of them.
  """
  found: list[int] = []
  token = _NEEDED.set(found)
  try:
    # JAX caches traces by function, so this must be a new one.
    jax.eval_shape(lambda *x, **y: call(*x, **y), *arguments, **named)
  finally:
    _NEEDED.reset(token)
  return max(found)


def too_large(needed: int, name: str, fix: str) -> str | None:
  """Returns why a kernel's blocks cannot fit, or None if they fit.

  Args:
    needed: Bytes that the kernel needs.
    name: Name of the kernel.
    fix: What the user can do about it.
  """
  if needed <= LIMIT:
    return None
  return f"{name} needs {needed:,} bytes of VMEM, more than {LIMIT:,}: {fix}"


def run(
  body: Callable[[dict[str, Any]], None],
  name: str,
  grid: tuple[int, ...],
  operands: Named,
  results: Named,
  *,
  specs: Named,
  scratch: Named,
  fix: str,
  scalars: Named | None = None,
  sequential: int = 1,
) -> dict[str, Any]:
  """Runs a kernel.

  Args:
    body: Takes the references by name: scalars, operands, results, scratch.
    name: Name of the kernel.
    grid: Number of steps along each axis.
    operands: Arrays.
    results: Shapes of what is returned.
    specs: Block specs of operands and results. Where there are scalars, their
      index maps get those after the indices of the grid.
    scratch: Memory references that last from step to step.
    fix: What the user can do if the blocks do not fit.
    scalars: Integers that a kernel reads before it starts; None are left out.
    sequential: Number of the grid's last axes that run in order.

  Returns:
    The results, by name.

  Raises:
    NotImplementedError: The blocks do not fit in VMEM.
  """
  size = num_bytes({**operands, **results}, specs, scratch)
  if (sizes := _NEEDED.get()) is not None:
    sizes.append(size)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(results))
  if reason := too_large(size, name, fix):
    raise NotImplementedError(reason)
  before = {k: x for k, x in (scalars or {}).items() if x is not None}
  named = {**before, **operands, **results, **scratch}
  structure = jax.tree.structure(list(named.values()))

  def kernel(*refs):
    body(dict(zip(named, jax.tree.unflatten(structure, refs), strict=True)))

  def of(arrays):
    return _flat({k: specs[k] for k in arrays})

  given = *before.values(), *_flat(operands)
  given = contract.vary_like(given, given)
  parallel = ("parallel",) * (len(grid) - sequential)
  launch = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(before),
      grid=grid,
      in_specs=of(operands),
      out_specs=of(results),
      scratch_shapes=_flat(scratch),
    ),
    out_shape=_varying(_flat(results), given[0]),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=parallel + ("arbitrary",) * sequential,
      vmem_limit_bytes=LIMIT,
    ),
    name=name,
    interpret=interpret(),
  )
  # The kernel's own numbers have 32 bits where the program's have 64, too.
  with jax.enable_x64(False):
    outputs = launch(*given)
  structure = jax.tree.structure(list(results.values()))
  outputs = jax.tree.unflatten(structure, outputs)
  return dict(zip(results, outputs, strict=True))


def struct(x: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of x, or its shape in another dtype."""
  return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def _varying(shapes: list[Any], given: jax.Array) -> list[Any]:
  """Returns the shapes of results that, in a `shard_map`, vary as `given`."""
  varies = jax.typeof(given).manual_axis_type
  return [
    jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varies)
    for x in shapes
  ]


def _flat(named: Named) -> list[Any]:
  """Returns the leaves, in the order of the names."""
  return jax.tree.leaves(list(named.values()))
