"""Logical axis names, the one table that maps them to the mesh, and the mesh.

Parameters carry logical names (`nnx.Param(..., axes=("embed", "mlp"))`)
and activations are constrained by them; only this file knows the mesh.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memcomp import errors
from memcomp_kernels import hand_off, wavefront
from memcomp_kernels import sharding as kernel_sharding

AXES = ("replica", "fsdp", "tensor", "context")

BATCH_AXES = ("replica", "fsdp")
HEAD_AXES = ("tensor",)

TIME_AXIS = "context"

RULES: dict[str, tuple[str, ...]] = {
  "batch": BATCH_AXES,
  "time": (TIME_AXIS,),
  "embed": ("fsdp",),
  "act_embed": (),
  "heads": HEAD_AXES,
  "mlp": ("tensor",),
  "vocab": ("tensor",),
  "key_dim": (),
  "value_dim": (),
  "slots": (),
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

  Of several TPU slices the replica axis goes over slices first, over the
  network between them (DCN); all other axes stay within a slice.

  Raises:
    UserError: the axes do not multiply to a number of devices that exists, or
      do not fit the slices.
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
  # On GPUs a slice is a host or an NVLink domain, which fsdp may well cross.
  tpus = devices[0].platform == "tpu"
  slices = len({getattr(d, "slice_index", 0) for d in devices}) if tpus else 1
  if slices > 1:
    _check_slices(sizes, count, len(devices), slices)
  if count == len(devices) and tpus:
    from jax.experimental import mesh_utils

    # Devices of one slice to compile for have no slice_index.
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
  """The mesh of the first device alone."""
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


def shardings(tree: Any, mesh: Mesh) -> Any:
  """Replaces every Variable of `tree` by its NamedSharding on `mesh`.

  A Variable's last axes are named by its `axes` metadata; other leaves, and
  Variables without it, are replicated.
  """

  def one(leaf):
    names = ()
    if isinstance(leaf, nnx.Variable):
      names = axes_of(leaf)
    sharding = NamedSharding(mesh, spec(*names))
    return (
      leaf.replace(sharding) if isinstance(leaf, nnx.Variable) else sharding
    )

  return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
  """The logical names of a Variable's axes, by its `axes` metadata.

  The names stand for the last axes: those that a vmap or a scan over layers
  puts in front have none.
  """
  names = variable.get_metadata().get("axes") or ()
  return (None,) * (variable.ndim - len(names)) + tuple(names)


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
    names = axes_of(variable)
    for name, size in zip(names, variable.shape, strict=True):
      axes = RULES[name] if name is not None else ()
      shards = math.prod(mesh.shape[axis] for axis in axes)
      if size % shards:
        where = " * ".join(f"mesh.{axis}" for axis in axes)
        raise errors.UserError(
          f"{'.'.join(map(str, path))}: its axis {name!r} of {size} does not"
          f" divide over {where} = {shards}; set {where} to a divisor of {size}"
        )


# Narrower shards of features XLA:TPU gathers by an all-reduce of the whole, and
# pads: 3 to 12 did (125m, v5e), 32 did (1b: all on v5p, some on v5e); 48 and
# more did not.
_LEAST_FEATURES, _FEATURES_TILE = 48, 16


def widest_fsdp(d_model: int, shards: int) -> int:
  """The most of `shards` over which parameters gather well; divides them."""

  def gathers(n):
    whole = d_model % (n * _FEATURES_TILE) == 0
    return n == 1 or (whole and d_model // n >= _LEAST_FEATURES)

  return max(n for n in range(1, shards + 1) if shards % n == 0 and gathers(n))


def narrow_shards(d_model: int, mesh: Mesh) -> str | None:
  """One line on a better mesh, if shards of parameters are too narrow here."""
  fsdp = mesh.shape["fsdp"]
  if fsdp == 1 or d_model // fsdp >= _LEAST_FEATURES:
    return None
  better = widest_fsdp(d_model, fsdp)
  replica = mesh.shape["replica"] * fsdp // better
  return (
    f"mesh.fsdp={fsdp} leaves {d_model // fsdp} of {d_model} features a shard,"
    " which TPUs pad and gather by all-reduces; better"
    f" mesh.replica={replica}, mesh.fsdp={better}"
  )


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of `[batch, time]` arrays."""
  return NamedSharding(mesh, spec("batch", "time"))


def rows_of_process(mesh: Mesh, rows: int) -> np.ndarray:
  """Which rows of a batch this process's devices hold, ascending.

  Processes that share a shard (of heads, say) hold the same rows.

  Args:
    mesh: of the run.
    rows: of the batch, a multiple of its shards.

  Raises:
    UserError: processes hold rows in common, but not the same.
  """
  held: dict[int, set[int]] = {}
  where = NamedSharding(mesh, spec("batch")).devices_indices_map((rows,))
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
  """The tokens of each row that this process's devices hold.

  Args:
    mesh: of the run.
    time: tokens of a row.

  Raises:
    UserError: they are not neighbours, as with shards of other processes
      between them.
  """
  axis = mesh.axis_names.index(TIME_AXIS)
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
      f" mesh.{TIME_AXIS}={mesh.shape[TIME_AXIS]}, with others' between them;"
      " let the devices of a process divide it, or be a multiple of it"
    )
  each = time // mesh.shape[TIME_AXIS]
  return slice(held[0] * each, (held[-1] + 1) * each)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains an activation by logical names; nothing without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(*names))


def gathered(table: jax.Array, dtype: str) -> jax.Array:
  """A table `[vocab, features]`, whole on every shard of rows and time.

  It crosses the mesh once, and so does the sum of the gradients of all its
  uses, in `dtype` as those of all other weights: the partitioner would reduce
  the whole table for each use. On a shard they are summed in float32.

  Returns:
    `[shards, vocab, features]`, for `per_shard`: values of `dtype`, held as the
    table came.
  """
  mesh = jax.sharding.get_abstract_mesh()

  def whole(table):
    # Shards on an axis of their own, or TPUs reduce the whole gradient.
    parts = jax.lax.all_gather(table.astype(dtype).T, RULES["embed"])
    parts = parts.reshape(-1, parts.shape[-1]).T[None]
    return parts.astype(table.dtype)

  if mesh.empty or mesh.size == 1:
    return table.astype(dtype).astype(table.dtype)[None]
  return jax.shard_map(
    whole,
    in_specs=spec("vocab", "embed"),
    out_specs=PartitionSpec((*BATCH_AXES, TIME_AXIS), *spec("vocab", None)),
    # The check would want it proven that axes without a name hold the same.
    check_vma=False,
  )(table)


def per_shard(
  function: Callable[[jax.Array, jax.Array], jax.Array],
  table: jax.Array,
  rows: jax.Array,
) -> jax.Array:
  """Returns `function(table, rows)`, the rows of a shard with its table.

  Args:
    function: of one table and some rows; gives back rows.
    table: `[shards, ...]`, of `gathered`, or of one shard.
    rows: `[batch, time, ...]`.
  """
  if len(table) == 1:
    return function(table[0], rows)
  batch, time = rows.shape[:2]
  shards = time_shards()
  if time % shards:  # as at the end of a loss in parts: few tokens
    table, shards = table[::shards], 1

  def as_batch(x):
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2)
    laid = spec("batch", "time" if shards > 1 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*laid, *free))

  cut = len(table) // shards, -1, shards, time // shards
  parts = jnp.moveaxis(as_batch(rows).reshape(*cut, *rows.shape[2:]), 2, 1)
  y = jax.vmap(function)(table, parts.reshape(len(table), *parts.shape[2:]))
  y = jnp.moveaxis(y.reshape(*parts.shape[:2], *y.shape[1:]), 1, 2)
  return as_batch(y.reshape(batch, time, *y.shape[4:]))


def head_shards() -> int:
  """Parts that heads are laid into on the mesh in use, 1 without one."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(1 if mesh.empty else mesh.shape[axis] for axis in HEAD_AXES)


def time_shards() -> int:
  """Shards of time on the mesh in use, 1 without one."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else mesh.shape[TIME_AXIS]


def on_mesh(
  chunk: Callable[..., Any],
  *,
  over_time: hand_off.HandOff = wavefront.hand_over,
  with_stats: bool = False,
) -> Callable[..., Any]:
  """A memory's `chunk`, its rows, heads and time laid over the mesh in use.

  Args:
    chunk: see `memcomp_kernels.sharding.shard_chunk`, as what follows.
    over_time: how shards of time hand over the state.
    with_stats: whether `chunk` returns `triangular.Stats`, too.
  """
  return kernel_sharding.shard_chunk(
    chunk,
    batch_axes=BATCH_AXES,
    head_axes=HEAD_AXES,
    time_axis=TIME_AXIS,
    over_time=over_time,
    with_stats=with_stats,
  )
