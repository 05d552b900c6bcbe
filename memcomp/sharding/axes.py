"""Rules that map the logical axes of a model to the axes of a mesh.

A parameter names its last axes in its metadata, `nnx.Param(x, axes=("embed",
"heads"))`, and a layer names the axes of its activations. Only `Rules` map
these names to a mesh. A layer without rules shards nothing and looks nothing
up, so it works under any mesh:

  rules = sharding.rules(mesh, batch="data", heads="model")
  layer = Trellis(512, heads=8, rngs=nnx.Rngs(0), rules=rules)
  rules.place(layer)
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from memcomp_kernels.op import Op
from memcomp_kernels.parallel import shard as kernel_sharding
from memcomp_kernels.parallel import state_passing

NAMES = (
  *("batch", "time", "act_embed"),
  *("embed", "heads", "mlp", "vocab"),
  *("key_dim", "value_dim", "slots", "window"),
)
"""Logical axes: of activations; of parameters ("heads" and "mlp" also of
activations); of memories. "embed" belongs to parameters and "act_embed" to
activations: a mesh axis that shards the batch cannot also shard its
features."""


@dataclasses.dataclass(frozen=True)
class Rules:
  """A map from logical axes to mesh axes; made by `rules`.

  It is frozen and hashable. Layers hold it as a static attribute, so it is part
  of every jit key.

  Attributes:
    pairs: logical names and their mesh axes; omitted names are not sharded.
    mesh: the mesh, unless one is in use (`jax.set_mesh`), which takes
      precedence. Without either nothing is sharded.
  """

  pairs: tuple[tuple[str, tuple[str, ...]], ...] = ()
  mesh: Mesh | None = None

  def axes(self, name: str | None) -> tuple[str, ...]:
    """The mesh axes of a logical name; () if it is not sharded."""
    return dict(self.pairs).get(name, ()) if name is not None else ()

  def spec(self, *names: str | None) -> PartitionSpec:
    """The partition spec of an array whose axes have these logical names.

    Raises:
      ValueError: a name is unknown, or two axes map to one mesh axis.
    """
    parts, used = [], set()
    for name in names:
      if name is not None and name not in NAMES:
        raise ValueError(
          f"unknown logical axis {name!r}; known: {', '.join(NAMES)}"
        )
      axes = self.axes(name)
      if used & set(axes):
        raise ValueError(
          f"axes {names} collide: two of them map to mesh axis"
          f" {(used & set(axes)).pop()!r}; give each its own"
        )
      used |= set(axes)
      parts.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*parts)

  def active_mesh(self) -> Any:
    """The mesh to shard over, or None if nothing should be sharded.

    None without rules, without a mesh, on one device, and inside the caller's
    own `shard_map` over these axes, where arrays are local.

    Raises:
      ValueError: the rules name an axis that the mesh in use lacks.
    """
    used = {axis for _, axes in self.pairs for axis in axes}
    if not used:
      return None
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and self.mesh is not None:
      # Layers compute with Auto axes, see `sharding.explicit`.
      auto = (AxisType.Auto,) * len(self.mesh.axis_names)
      mesh = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=auto)
    if mesh.empty or mesh.size == 1:
      return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if missing := sorted(used - types.keys()):
      raise ValueError(
        f"the sharding rules name the mesh axis {missing[0]!r}, but the mesh in"
        f" use has {mesh.axis_names}: set the mesh of the rules, or change them"
      )
    manual = any(types[axis] == AxisType.Manual for axis in used)
    return None if manual else mesh

  def needs_xla_form(self) -> bool:
    """Whether the partitioner will shard the memory, which excludes kernels.

    XLA cannot partition a Pallas kernel automatically; kernels need rules.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = AxisType.Auto in mesh.axis_types
    return auto and mesh.size > 1 and self.active_mesh() is None

  def shards(self, name: str) -> int:
    """Number of shards of a logical axis; 1 if it is not sharded."""
    mesh = self.active_mesh()
    if mesh is None:
      return 1
    return math.prod(mesh.shape[axis] for axis in self.axes(name))

  def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of an activation with these logical axes.

    A time axis of one token is not sharded, so layers may step.

    Raises:
      ValueError: the mesh does not divide an axis, so it would be padded.
    """
    mesh = self.active_mesh()
    if mesh is None:
      return x
    names = tuple(
      None if name == "time" and size == 1 else name
      for name, size in zip(names, x.shape, strict=True)
    )
    self.check_divides(x, *names)
    place = NamedSharding(mesh, self.spec(*names))
    return jax.lax.with_sharding_constraint(x, place)

  def check_divides(self, x: jax.Array, *names: str | None) -> None:
    """Raises ValueError if the mesh does not divide one of these axes of x."""
    for name, size in zip(names, x.shape, strict=True):
      if name is not None:
        self.check_size(name, size)

  def check_size(self, name: str, size: int, called: str | None = None) -> None:
    """Raises ValueError if the mesh does not divide the size of an axis.

    Args:
      name: logical name of the axis.
      size: its size.
      called: the option that sets the size, if it has another name.
    """
    if size % self.shards(name):
      called = called or name
      raise ValueError(
        f"{called}={size} does not divide over the mesh axes"
        f" {self.axes(name)} = {self.shards(name)}; change {called}, or the"
        " sharding rules"
      )

  def indivisible_axes(
    self, variables: nnx.State, mesh: Mesh
  ) -> Iterator[tuple[str, str, int, tuple[str, ...], int]]:
    """Yields the parameter axes that a mesh does not divide.

    Yields:
      The parameter's path, the axis' logical name and size, its mesh axes, and
      their number of shards.
    """
    for path, variable in nnx.to_flat_state(variables):
      for name, size in zip(axes_of(variable), variable.shape, strict=True):
        axes = self.axes(name)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
          yield ".".join(map(str, path)), str(name), size, axes, parts

  def shardings(self, tree: Any, mesh: Mesh | None = None) -> Any:
    """Replaces every Variable of `tree` by the NamedSharding of its axes.

    Args:
      tree: tree of Variables and arrays, from `nnx.split` or an optimizer;
        plain arrays are replicated.
      mesh: None uses the mesh of the rules, else that of `jax.set_mesh`.

    Raises:
      ValueError: there is no mesh, or it does not divide a parameter.
    """
    mesh = mesh or self.mesh or _mesh_in_use()
    if mesh is None:
      raise ValueError(
        "shardings need a mesh: rules(mesh, ...), or jax.set_mesh(mesh)"
      )
    variables = isinstance(tree, nnx.State)
    for path, name, size, axes, parts in (
      self.indivisible_axes(tree, mesh) if variables else ()
    ):
      raise ValueError(
        f"{path}: its axis {name!r} of {size} does not divide over the mesh"
        f" axes {axes} = {parts}; change the layer's sizes, or the rules"
      )

    def one(leaf):
      if not isinstance(leaf, nnx.Variable):
        return NamedSharding(mesh, PartitionSpec())
      return leaf.replace(NamedSharding(mesh, self.spec(*axes_of(leaf))))

    return jax.tree.map(
      one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )

  def place(self, module: nnx.Module, mesh: Mesh | None = None) -> None:
    """Shards the parameters of a module by these rules, in place.

    Args:
      module: any module whose parameters name their axes.
      mesh: see `shardings`.
    """
    state = nnx.state(module)
    nnx.update(module, jax.device_put(state, self.shardings(state, mesh)))

  def shard_chunk(
    self, op: Op, pass_state: state_passing.Strategy
  ) -> Callable[..., Any]:
    """Shards batch, heads and time of an op by `shard_map`.

    Args:
      op: the memory, whose `with_stats` the result is, sharded.
      pass_state: how shards of time pass the state on.
    """
    mesh = self.active_mesh()
    if mesh is None:
      return op.with_stats
    (time,) = self.axes("time") or (None,)
    return kernel_sharding.shard_chunk(
      op.with_stats,
      mesh=mesh,
      batch_axes=self.axes("batch"),
      head_axes=self.axes("heads"),
      time_axis=time,
      pass_state=pass_state,
      with_stats=True,
    )


NONE = Rules()
"""No rules: nothing is sharded or looked up."""


def rules(mesh: Mesh | None = None, /, **axes: str | tuple[str, ...]) -> Rules:
  """Makes rules: `rules(mesh, batch="data", heads="model")`.

  Args:
    mesh: None uses the mesh in use (`jax.set_mesh`).
    axes: one or several mesh axes for each logical name (`NAMES`).

  Raises:
    ValueError: the logical name is unknown, `mesh` lacks an axis, time maps to
      several axes, or two of batch, time and heads to one.
  """
  pairs = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in axes.items()}
  for name, places in pairs.items():
    if name not in NAMES:
      raise ValueError(
        f"there is no logical axis {name!r}; there are: {', '.join(NAMES)}"
      )
    missing = [a for a in places if mesh and a not in mesh.axis_names]
    if mesh is not None and missing:
      raise ValueError(
        f"{name}={missing[0]!r}: the mesh has the axes {mesh.axis_names}"
      )
  if len(pairs.get("time", ())) > 1:
    raise ValueError(f"time={axes['time']!r} must be one mesh axis")
  found = Rules(tuple(sorted(pairs.items())), mesh)
  found.spec("batch", "time", "heads")  # axes of every memory's inputs
  return found


def use(module: nnx.Module, rules: Rules) -> None:
  """Gives rules to a module and to all submodules that take them."""
  for _, node in nnx.iter_graph(module):
    if hasattr(node, "rules"):
      node.rules = rules


def rules_of_types(
  mesh: Any,
  x: jax.Array,
  names: tuple[str, ...],
  params: Any,
  heads: int | None = None,
) -> Rules:
  """Derives rules from the types of Explicit arrays.

  Args:
    mesh: a mesh with Explicit axes.
    x: array whose first axes are called `names`.
    names: logical names.
    params: Variables; their named and sharded axes become rules.
    heads: number of heads of the layer. If the mesh does not divide it, heads
      are not sharded.
  """
  laid = jax.typeof(x).sharding.spec
  found = dict(zip(names, laid, strict=False))
  for _, variable in nnx.to_flat_state(params):
    spec = jax.typeof(variable[...]).sharding.spec
    for name, place in zip(axes_of(variable), spec, strict=False):
      if name in ("heads", "mlp", "vocab") and place is not None:
        found[name] = place
  pairs = {}
  for name, place in found.items():
    axes = (place,) if isinstance(place, str) else tuple(place or ())
    if name == "time" and len(axes) > 1:
      raise ValueError(
        f"x's time lies over the mesh axes {axes}, and a layer takes one:"
        " reshard x"
      )
    parts = math.prod(mesh.shape[axis] for axis in axes)
    taken = {axis for name in ("batch", "time") for axis in pairs.get(name, ())}
    divides = name != "heads" or heads is None or heads % parts == 0
    if axes and divides and not taken & set(axes):
      pairs[name] = axes
  return rules(**pairs)


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
  """The logical names of a Variable's axes, from its `axes` metadata.

  The names belong to the last axes. Axes that a vmap or scan over layers
  prepends have no name.
  """
  names = variable.get_metadata().get("axes") or ()
  return (None,) * (variable.ndim - len(names)) + tuple(names)


def _mesh_in_use() -> Mesh | None:
  mesh = jax.sharding.get_mesh()
  return None if mesh.empty else mesh
