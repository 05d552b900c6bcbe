"""Says where a GPU kernel can run, and runs it over the tiles of all heads.

One thread block is one warpgroup. It takes one head, or some value columns of
one head. If something is carried, the block runs all of the head's tiles in
turn and keeps the memories in registers. Otherwise it runs a single tile.
"""

import contextlib
import contextvars
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels import dispatch
from memcomp_kernels.pallas_gpu import smem, stream

Carry = tuple[jax.Array, ...]
Body = Callable[[dict[str, Any], dict[str, jax.Array], Carry], Carry]

_MODE: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "mosaic_gpu", default=None
)
_LOWER = "lower"


@contextlib.contextmanager
def interpreted(**params) -> Iterator[None]:
  """Context in which kernels run in the interpreter, on any platform.

  Args:
    **params: Arguments of `plgpu.InterpretGPUParams`, such as
      detect_races=True.
  """
  token = _MODE.set(plgpu.InterpretGPUParams(**params))
  try:
    yield
  finally:
    _MODE.reset(token)


def tried(**params) -> contextlib.AbstractContextManager[None]:
  """Context in which kernels run on a GPU if it supports them.

  Otherwise they run in the interpreter, as in `interpreted`. Tests use this
  context: with JAX_PLATFORMS=cuda,cpu they test the real kernels.

  Args:
    **params: Arguments of `interpreted`.
  """
  if unavailable() is None:
    return contextlib.nullcontext()
  return interpreted(**params)


@contextlib.contextmanager
def lowered() -> Iterator[None]:
  """Context in which kernels are lowered for GPUs, on any devices."""
  token = _MODE.set(_LOWER)
  try:
    yield
  finally:
    _MODE.reset(token)


def interpret() -> Any:
  """Returns the `interpret` argument for a `plgpu.kernel` in this context."""
  mode = _MODE.get()
  return False if mode is None or mode == _LOWER else mode


def unavailable() -> str | None:
  """Returns why kernels cannot run here, or None if they can."""
  if _MODE.get() is not None:
    return None
  platform = dispatch.current_platform()
  if platform != "gpu":
    return f"it is a GPU kernel, and the devices in use are of {platform}"
  device = dispatch.default_device()
  capability = str(getattr(device, "compute_capability", "unknown"))
  if not capability.startswith("9."):
    return (
      "it is for GPUs of compute capability 9 (Hopper), and "
      f"{device.device_kind} has {capability}"
    )
  return None


def load(ref: Any) -> jax.Array:
  """Loads a memory from global memory in the layout of wgmma's results."""
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def wide(ref: Any) -> jax.Array:
  """Loads a matrix from shared memory in the same layout, as float32."""
  x = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
  return x.astype(jnp.float32)


def run(
  body: Body,
  name: str,
  operands: Mapping[str, jax.Array],
  results: Mapping[str, jax.ShapeDtypeStruct],
  *,
  heads: int,
  local: Mapping[str, jax.ShapeDtypeStruct],
  memories: Collection[str] = (),
  carried: Sequence[tuple[str, str]] = (),
  columns: int = 1,
  by_columns: Sequence[str] = (),
  in_place: Mapping[str, str] | None = None,
  zeroed: Collection[str] = (),
  reverse: bool = False,
) -> dict[str, jax.Array]:
  """Runs a body over the tiles of all heads.

  Args:
    body: Maps (references by name, scalars by name, carried arrays) to the
      carried arrays after the tile. A reference is to the tile's part of an
      array, to a head's memory, or to an array of `local`.
    name: Name of the kernel, for errors.
    operands: By name: arrays by tile, `[tiles, batch, heads or groups, ...]`,
      with one or two last axes; scalars by tile, `[tiles, batch]` or `[tiles,
      batch, heads]`; and memories.
    results: Shapes by name, with the same layouts. In place of groups, the axis
      may also be blocks of columns within heads.
    heads: Number of heads of values.
    local: Arrays in shared memory for the body's own use.
    memories: Names of the memories, `[batch, heads, ...]`, which are not by
      tile.
    carried: For each carried array, the memory that it starts as and the memory
      that receives its last value. If nothing is carried, tiles run in
      parallel.
    columns: Columns per thread block.
    by_columns: Names of the arrays of which a thread block has only these
      columns.
    in_place: Results that may overwrite an operand if shared memory is short of
      room, with the operand of each. The body does not read that operand
      afterwards.
    zeroed: Names of memories among the results that start as zeros.
    reverse: Whether to start at the last tile.

  Raises:
    NotImplementedError: Shared memory has no room for a tile.
  """
  arrays = {**operands, **results}
  scalars = [key for key, x in arrays.items() if x.ndim < 4]
  by_tile = [
    key for key in arrays if key not in memories and key not in scalars
  ]
  num_tiles, batch = arrays[by_tile[0]].shape[:2]
  steps = num_tiles if carried else 1
  width = arrays[by_columns[0]].shape[-1] if by_columns else columns
  blocks = width // columns
  parts = {
    key: jax.ShapeDtypeStruct(
      (*arrays[key].shape[3:-1], columns)
      if key in by_columns
      else arrays[key].shape[3:],
      arrays[key].dtype,
    )
    for key in by_tile
  }
  in_place = in_place or {}
  slots, held = smem.slots(
    [x for key, x in parts.items() if key in operands],
    {key: x for key, x in parts.items() if key in results},
    local.values(),
    name,
    in_place,
    steps=steps,
    blocks=batch * heads * blocks,
  )
  swizzle = smem.swizzle([*parts.values(), *local.values()])
  replaced = {key: in_place[key] for key in in_place if not held[key]}
  held = dict.fromkeys((key for key in parts if key in operands), slots) | held

  def kernel(*given):
    *whole, buffers, scratch, arrived = given
    refs: dict[str, Any] = dict(zip(arrays, whole, strict=True))
    row, lane = lax.axis_index("row"), lax.axis_index("lane")
    head, block = lax.div(lane, jnp.int32(blocks)), lax.rem(lane, blocks)

    def tile(step):
      if not carried:
        return lax.axis_index("tile")
      return num_tiles - 1 - step if reverse else step

    def part(key, *at):
      if key in by_columns:
        inner = [slice(None)] * (len(arrays[key].shape) - len(at) - 2)
        own = pl.ds(block * columns, columns)
        return refs[key].at[(*at, head, *inner, own)]
      shared_by = heads * blocks // arrays[key].shape[len(at)]
      return refs[key].at[(*at, lax.div(lane, jnp.int32(shared_by)))]

    def streams(of):
      return {
        key: stream.Stream(
          lambda step, key=key: part(key, tile(step), row),
          buffers[replaced.get(key, key)],
        )
        for key in parts
        if key in of and (held[key] or key in replaced)
      }

    own = {key: part(key, row) for key in memories if key in arrays} | scratch

    def one(step, found, carry):
      at = tile(step), row, head
      values = {key: refs[key][at[: arrays[key].ndim]] for key in scalars}
      direct = {
        key: part(key, tile(step), row) for key in parts if key not in found
      }
      return body(own | direct | found, values, carry)

    for key in zeroed:
      own[key][...] = jnp.zeros(own[key].shape, arrays[key].dtype)
    final = stream.run(
      one,
      tuple(load(own[first]) for first, _ in carried),
      steps=steps,
      inputs=streams(operands),
      outputs=streams(results.keys() - replaced.keys()),
      replaced=streams(replaced),
      arrived=arrived,
    )
    for (_, last), value in zip(carried, final, strict=True):
      own[last][...] = value

  launch = plgpu.kernel(
    kernel,
    out_type=list(results.values()),
    scratch_types=[
      {
        key: smem.buffer((held[key], *x.shape), x.dtype, swizzle)
        for key, x in parts.items()
        if held[key]
      },
      {key: smem.buffer(x.shape, x.dtype, swizzle) for key, x in local.items()},
      plgpu.Barrier(
        num_arrivals=sum(key in operands for key in parts), num_barriers=slots
      ),
    ],
    grid=(num_tiles // steps, batch, heads * blocks),
    grid_names=("tile", "row", "lane"),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret(),
    kernel_name=name,
  )
  # The kernel's own numbers have 32 bits where the program's have 64, too.
  with jax.enable_x64(False):
    outputs = launch(*operands.values())
  return dict(zip(results, outputs, strict=True))
