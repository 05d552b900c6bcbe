"""Logical axis names, the one table that maps them to the mesh, and the mesh.

Parameters carry logical names (`nnx.Param(..., out_sharding=("embed", "mlp"))`)
and activations are constrained by them; only this file knows the mesh.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memcomp import errors
from memcomp_kernels import sharding as kernel_sharding

AXES = ("replica", "fsdp", "tensor", "context")

BATCH_AXES = ("replica", "fsdp")
HEAD_AXES = ("tensor",)

RULES: dict[str, tuple[str, ...]] = {
  "batch": BATCH_AXES,
  "time": (),
  "embed": ("fsdp",),
  "act_embed": (),
  "heads": HEAD_AXES,
  "mlp": ("tensor",),
  "vocab": ("tensor",),
  "key_dim": (),
  "value_dim": (),
  "slots": (),
  "layers": (),
  "window": (),
}
"""Logical name -> mesh axes. "embed" is of parameters, "act_embed" of
activations: a batch sharded over fsdp cannot have its features there too."""


def spec(*names: str | None) -> PartitionSpec:
  """The partition spec of an array whose axes have these logical names.

  Raises:
    ValueError: a name is unknown, or two axes map to one mesh axis.
  """
  parts, used = [], set()
  for name in names:
    if name is not None and name not in RULES:
      raise ValueError(
        f"unknown logical axis {name!r}; known: {', '.join(RULES)}"
      )
    axes = RULES[name] if name is not None else ()
    if used & set(axes):
      raise ValueError(
        f"axes {names} collide: two of them map to mesh axis"
        f" {(used & set(axes)).pop()!r}"
      )
    used |= set(axes)
    parts.append(axes if len(axes) > 1 else axes[0] if axes else None)
  return PartitionSpec(*parts)


def make_mesh(config: Any, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Builds the mesh of a `MeshConfig` over `devices` (default: all).

  Raises:
    UserError: the axes do not multiply to a number of devices that exists.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = {name: getattr(config, name) for name in AXES}
  free = [name for name, size in sizes.items() if size == -1]
  for name, size in sizes.items():
    if size < 1 and size != -1:
      raise errors.UserError(
        f"mesh.{name}={size} is not a size; use 1 or more, or -1 for the rest"
      )
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if len(free) > 1:
    raise errors.UserError(
      f"mesh.{free[0]} and mesh.{free[1]} are both -1; only one axis can take"
      " the devices that are left"
    )
  if free:
    if len(devices) % fixed:
      raise errors.UserError(
        f"the mesh axes multiply to {fixed}, which does not divide the"
        f" {len(devices)} devices; change mesh.{free[0]}=-1 or the others"
      )
    sizes[free[0]] = len(devices) // fixed
  count = math.prod(sizes.values())
  if count > len(devices):
    shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
    raise errors.UserError(
      f"the mesh asks for {count} devices ({shape}) but there are"
      f" {len(devices)}; make config.mesh smaller"
    )
  shape = tuple(sizes.values())
  if count == len(devices) and devices[0].platform == "tpu":
    from jax.experimental import mesh_utils

    grid = mesh_utils.create_device_mesh(
      shape, devices, allow_split_physical_axes=True
    )
  else:
    grid = np.array(devices[:count]).reshape(shape)
  return Mesh(grid, AXES)


def shardings(tree: Any, mesh: Mesh) -> Any:
  """Replaces every Variable of `tree` by its NamedSharding on `mesh`.

  A Variable's axes are named by its `out_sharding` metadata; other leaves, and
  Variables without it, are replicated.
  """

  def one(leaf):
    names = ()
    if isinstance(leaf, nnx.Variable):
      names = leaf.get_metadata().get("out_sharding") or ()
    sharding = NamedSharding(mesh, spec(*names))
    return (
      leaf.replace(sharding) if isinstance(leaf, nnx.Variable) else sharding
    )

  return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def check_divides(variables: nnx.State, mesh: Mesh) -> None:
  """Checks that every parameter's axes divide over the mesh.

  A constraint on an activation that does not is padded without a word; a
  `shard_map` over heads fails with an error that names no setting.

  Args:
    variables: `nnx.State` of abstract Variables with their metadata.
    mesh: that they are to lie on.

  Raises:
    UserError: naming the axis, its size and the mesh axes.
  """
  for path, variable in nnx.to_flat_state(variables):
    names = variable.get_metadata().get("out_sharding") or ()
    for name, size in zip(names, variable.shape, strict=False):
      axes = RULES[name] if name is not None else ()
      shards = math.prod(mesh.shape[axis] for axis in axes)
      if size % shards:
        where = " * ".join(f"mesh.{axis}" for axis in axes)
        raise errors.UserError(
          f"{'.'.join(map(str, path))}: its axis {name!r} of {size} does not"
          f" divide over {where} = {shards}; set {where} to a divisor of {size}"
        )


# Narrower shards than these XLA:TPU gathers by an all-reduce of the whole, and
# pads: shards of 3 to 12 rows did, of 24 and more did not.
_LEAST_ROWS, _ROWS_TILE = 24, 8


def narrow_shards(d_model: int, mesh: Mesh) -> str | None:
  """One line on a better mesh, if shards of parameters are too narrow here."""
  fsdp = mesh.shape["fsdp"]
  if fsdp == 1 or d_model // fsdp >= _LEAST_ROWS:
    return None
  better = max(
    n
    for n in range(1, fsdp + 1)
    if fsdp % n == 0
    and (
      n == 1
      or (d_model % (n * _ROWS_TILE) == 0 and d_model // n >= _LEAST_ROWS)
    )
  )
  replica = mesh.shape["replica"] * fsdp // better
  return (
    f"mesh.fsdp={fsdp} leaves {d_model // fsdp} of {d_model} features a shard,"
    " which TPUs pad and gather by all-reduces; better"
    f" mesh.replica={replica}, mesh.fsdp={better}"
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of `[batch, ...]` arrays."""
  return NamedSharding(mesh, spec("batch"))


def part_of_batch(mesh: Mesh) -> tuple[int, int]:
  """Which part of a batch's rows this process holds, and of how many.

  Processes that share a shard (of heads, say) hold the same part.

  Raises:
    UserError: processes hold rows in common, but not the same.
  """
  shards = mesh.shape["replica"] * mesh.shape["fsdp"]
  held: dict[int, set[int]] = {}
  where = batch_sharding(mesh).devices_indices_map((shards,))
  for device, (rows,) in where.items():
    rows = range(shards)[rows]
    held.setdefault(device.process_index, set()).update(rows)
  parts = sorted({tuple(sorted(rows)) for rows in held.values()})
  if sum(map(len, parts)) != shards or len({len(p) for p in parts}) > 1:
    raise errors.UserError(
      f"the {shards} shards of a batch do not lie in equal parts on"
      f" {len(held)} processes; let mesh.tensor * mesh.context divide the"
      " devices of a process, or be a multiple of them"
    )
  mine = tuple(sorted(held[jax.process_index()]))
  return parts.index(mine), len(parts)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains an activation by logical names; nothing without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(*names))


def head_shards() -> int:
  """Parts that heads are laid into on the mesh in use, 1 without one."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(1 if mesh.empty else mesh.shape[axis] for axis in HEAD_AXES)


def on_mesh(
  chunk: Callable[..., Any], *, with_stats: bool = False
) -> Callable[..., Any]:
  """A memory's `chunk`, its rows and heads laid over the mesh in use.

  `with_stats` if it also returns a pytree of `[batch, heads]`.
  """
  return kernel_sharding.shard_chunk(
    chunk,
    batch_axes=BATCH_AXES,
    head_axes=HEAD_AXES,
    with_stats=with_stats,
  )
