"""The trainer's mesh, and the part of a batch that each process holds."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from memcomp import errors
from memcomp.sharding import axes

AXES = ("replica", "fsdp", "tensor", "context")
"""Axes of the mesh."""

RULES = axes.rules(
  batch=("replica", "fsdp"),
  time="context",
  embed="fsdp",
  heads="tensor",
  mlp="tensor",
  vocab="tensor",
)
"""Rules for this mesh."""

_TIME_AXIS = "context"


def make_mesh(config: Any, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Builds the mesh of a `MeshConfig` over `devices` (default: all).

  With several TPU slices, the replica axis spans slices, over the network
  between them (DCN). All other axes stay within a slice.

  Raises:
    UserError: the axis sizes do not match the devices or the slices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = {name: getattr(config, name) for name in AXES}
  for name, size in sizes.items():
    if size < 1 and (name, size) != ("replica", -1):
      raise errors.UserError(
        f"mesh.{name}={size} is not a size; use 1 or more, or mesh.replica=-1"
        " for the rest"
      )
  if sizes["replica"] == -1:
    others = math.prod(sizes[name] for name in AXES[1:])
    if len(devices) % others:
      raise errors.UserError(
        f"the mesh axes multiply to {others}, which does not divide the"
        f" {len(devices)} devices; change mesh.replica=-1 or the others"
      )
    sizes["replica"] = len(devices) // others
  count = math.prod(sizes.values())
  if count > len(devices):
    shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
    raise errors.UserError(
      f"the mesh asks for {count} devices ({shape}) but there are"
      f" {len(devices)}; make config.mesh smaller"
    )
  shape = tuple(sizes.values())
  # A GPU slice is a host or an NVLink domain, which fsdp may cross.
  tpus = devices[0].platform == "tpu"
  slices = len({getattr(d, "slice_index", 0) for d in devices}) if tpus else 1
  if slices > 1:
    _check_slices(sizes, count, len(devices), slices)
  if count == len(devices) and tpus:
    from jax.experimental import mesh_utils

    # Compile-only devices of one slice have no slice_index.
    grid = (
      mesh_utils.create_device_mesh(
        shape, devices, allow_split_physical_axes=True
      )
      if slices == 1
      else mesh_utils.create_hybrid_device_mesh(
        (shape[0] // slices, *shape[1:]),
        (slices, *[1] * len(shape[1:])),
        devices,
        allow_split_physical_axes=True,
      )
    )
  else:
    grid = np.array(devices[:count]).reshape(shape)
  return Mesh(grid, AXES)


def one_device() -> Mesh:
  """The mesh of the first device only."""
  return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)


def _check_slices(
  sizes: dict[str, int], count: int, devices: int, slices: int
) -> None:
  """Checks that only the replica axis crosses slices, and all are used."""
  if count != devices:
    raise errors.UserError(
      f"the mesh takes {count} of the {devices} devices of {slices} slices; let"
      " it take all of them (mesh.replica=-1), or start fewer slices"
    )
  if sizes["replica"] % slices:
    raise errors.UserError(
      f"mesh.replica={sizes['replica']} is not a multiple of the {slices}"
      " slices, over which only replica can go; set mesh.replica to a multiple"
      f" of {slices} and mesh.fsdp, tensor, context to fit into the"
      f" {devices // slices} devices of a slice"
    )


def check_divides(module: nnx.Module, mesh: Mesh) -> None:
  """Checks that the mesh divides every parameter axis and all heads.

  Otherwise activations would be padded silently, and a `shard_map` over heads
  would fail with an error that names no setting.

  Args:
    module: a model of abstract Variables with their metadata.
    mesh: the mesh for them.

  Raises:
    UserError: naming the axis, its size and the mesh axes.
  """
  for path, name, size, places, parts in itertools.chain(
    RULES.indivisible_axes(nnx.state(module), mesh),
    _indivisible_heads(module, mesh),
  ):
    where = " * ".join(f"mesh.{axis}" for axis in places)
    raise errors.UserError(
      f"{path}: its axis {name!r} of {size} does not divide over {where} ="
      f" {parts}; set {where} to a divisor of {size}"
    )


def _indivisible_heads(
  module: nnx.Module, mesh: Mesh
) -> Iterator[tuple[str, str, int, tuple[str, ...], int]]:
  """Yields heads that the mesh does not divide, see `Rules.indivisible_axes`.

  A parameter's axis has the channels of all heads, which it may divide.
  """
  axes = RULES.axes("heads")
  parts = math.prod(mesh.shape[axis] for axis in axes)
  for path, node in nnx.iter_graph(module):
    for name in ("heads", "kv_heads"):
      if (size := getattr(node, name, 0)) % parts:
        yield ".".join(map(str, path)), name, size, axes, parts


# XLA:TPU gathers narrower feature shards by padding and an all-reduce of the
# whole. It did so at 3 to 12 features (125m, v5e) and at 32 (1b: all on v5p,
# some on v5e), but not at 48 and more.
_LEAST_FEATURES, _FEATURES_TILE = 48, 16


def widest_fsdp(d_model: int, shards: int) -> int:
  """The largest divisor of `shards` over which parameters gather well."""

  def gathers(n):
    whole = d_model % (n * _FEATURES_TILE) == 0
    return n == 1 or (whole and d_model // n >= _LEAST_FEATURES)

  return max(n for n in range(1, shards + 1) if shards % n == 0 and gathers(n))


def narrow_shards(d_model: int, mesh: Mesh) -> str | None:
  """Suggests a better mesh in one line if feature shards are too narrow."""
  fsdp = mesh.shape["fsdp"]
  if fsdp == 1 or d_model // fsdp >= _LEAST_FEATURES:
    return None
  better = widest_fsdp(d_model, fsdp)
  replica = mesh.shape["replica"] * fsdp // better
  return (
    f"mesh.fsdp={fsdp} leaves {d_model // fsdp} of {d_model} features per"
    " shard, which TPUs pad and gather by all-reduces; better"
    f" mesh.replica={replica}, mesh.fsdp={better}"
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of `[batch, time]` arrays."""
  return NamedSharding(mesh, RULES.spec("batch", "time"))


def rows_of_process(mesh: Mesh, rows: int) -> np.ndarray:
  """Ascending indices of the batch rows on this process's devices.

  Processes that share a shard (of heads, say) hold the same rows.

  Args:
    mesh: mesh of the run.
    rows: number of batch rows, a multiple of its shards.

  Raises:
    UserError: the rows of two processes overlap but differ.
  """
  held: dict[int, set[int]] = {}
  where = NamedSharding(mesh, RULES.spec("batch")).devices_indices_map((rows,))
  for device, (part,) in where.items():
    held.setdefault(device.process_index, set()).update(range(rows)[part])
  parts = {tuple(sorted(part)) for part in held.values()}
  if sum(map(len, parts)) != rows or len({len(p) for p in parts}) > 1:
    raise errors.UserError(
      f"the {rows} rows of a batch do not lie in equal parts on {len(held)}"
      " processes; let mesh.tensor * mesh.context divide the devices of a"
      " process, or be a multiple of them"
    )
  return np.array(sorted(held[jax.process_index()]))


def time_of_process(mesh: Mesh, time: int) -> slice:
  """The tokens of each row on this process's devices.

  Args:
    mesh: mesh of the run.
    time: number of tokens per row.

  Raises:
    UserError: they are not contiguous, because other processes hold shards
      between them.
  """
  axis = mesh.axis_names.index(_TIME_AXIS)
  held = sorted(
    {
      place[axis]
      for place, device in np.ndenumerate(mesh.devices)
      if device.process_index == jax.process_index()
    }
  )
  if held != list(range(held[0], held[-1] + 1)):
    raise errors.UserError(
      f"process {jax.process_index()} holds shards {held} of"
      f" mesh.{_TIME_AXIS}={mesh.shape[_TIME_AXIS]}, with others' between them;"
      " let the devices of a process divide it, or be a multiple of it"
    )
  each = time // mesh.shape[_TIME_AXIS]
  return slice(held[0] * each, (held[-1] + 1) * each)
