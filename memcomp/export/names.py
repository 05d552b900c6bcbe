"""Flat names of parameters, one for each array of each layer.

A name is a path of modules, such as `layers.3.mixer.projection.query.weight`,
with the depth of the layer regardless of its stack. As in most programs, a
linear map has a `weight` `[out, in]` and a `bias`. The scale of a norm and an
embedding table are called `weight`, too. Everything else keeps its name and
shape.
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from memcomp import errors, sharding
from memcomp.models import abstract, decoder
from memcomp.models import stacks as stacks_lib


class Entry(NamedTuple):
  """An array with a flat name.

  Attributes:
    name: flat name.
    shape: shape under the flat name.
    leaf: index of the parameter in `jax.tree.leaves` of all.
    place: index along the parameter's first axis; None takes all of it.
    transposed: whether the flat array is the transpose.
  """

  name: str
  shape: tuple[int, ...]
  leaf: int
  place: int | None
  transposed: bool


def entries(config: decoder.DecoderConfig, params: Any = None) -> list[Entry]:
  """Returns all arrays of a model: embeddings, layers in order, the rest.

  Args:
    config: config of the model.
    params: parameters or their shapes; None computes the shapes.
  """
  stacks = stacks_lib.stacks_of(config)
  if params is None:
    params = abstract.plain(abstract.model_of(config).variables)
  found: list[tuple[int, Entry]] = []
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for leaf, (keys, array) in enumerate(leaves):
    path = [str(key.key) for key in keys]
    if path[0] != "layers":
      depth = -1 if "embedding" in path[0] else config.num_layers
      found.append((depth, _entry(path, array.shape, leaf, None)))
      continue
    stack = stacks[int(path[1])]
    for place, depth in enumerate(stack.depths):
      own = ["layers", str(depth), *path[2:]]
      found.append((depth, _entry(own, array.shape[1:], leaf, place)))
  ordered = [entry for _, entry in sorted(found, key=lambda item: item[0])]
  counts = collections.Counter(entry.name for entry in ordered)
  name, count = counts.most_common(1)[0]
  if count > 1:
    raise ValueError(f"two parameters have the flat name {name}")
  return ordered


def take(leaves: list[jax.Array], entry: Entry) -> np.ndarray:
  """Returns a contiguous array on the host.

  Args:
    leaves: `jax.tree.leaves` of the parameters.
    entry: the array to return.
  """
  array = leaves[entry.leaf]
  array = np.asarray(array if entry.place is None else array[entry.place])
  return np.ascontiguousarray(array.T if entry.transposed else array)


def flatten(
  config: decoder.DecoderConfig, params: Any
) -> dict[str, np.ndarray]:
  """Returns the parameters of a model by flat name."""
  leaves = jax.tree.leaves(params)
  return {entry.name: take(leaves, entry) for entry in entries(config, params)}


def unflatten(
  config: decoder.DecoderConfig,
  read: Callable[[str], np.ndarray],
  mesh: Mesh | None = None,
) -> Any:
  """Returns the parameters of a model on a mesh.

  Args:
    config: config of the model.
    read: returns the array of a flat name.
    mesh: mesh for the parameters; None is one device.

  Raises:
    UserError: an array has the wrong shape for the model, or no floating point
      numbers.
  """
  mesh = mesh or sharding.one_device()
  target = abstract.params_of(abstract.model_of(config), mesh)
  of_leaf = collections.defaultdict(list)
  for entry in entries(config, target):
    of_leaf[entry.leaf].append(entry)

  def build(leaf: int, spec: jax.ShapeDtypeStruct) -> jax.Array:
    group = sorted(of_leaf[leaf], key=lambda entry: entry.place or 0)
    arrays = []
    for entry in group:
      array = read(entry.name)
      if array.shape != entry.shape:
        raise errors.UserError(
          f"{entry.name} has the shape {array.shape}, the model's is"
          f" {entry.shape}: the config and the arrays are not of one model"
        )
      # A cast would take the numbers of a quantized model for its weights.
      if not jnp.issubdtype(array.dtype, jnp.floating):
        raise errors.UserError(
          f"{entry.name} is of {array.dtype}, as in quantized models, which"
          " cannot be read; give one of float32, bfloat16 or float16"
        )
      arrays.append(array.T if entry.transposed else array)
    stacked = arrays[0] if group[0].place is None else np.stack(arrays)
    return jax.device_put(stacked.astype(spec.dtype), spec.sharding)

  specs, treedef = jax.tree.flatten(target)
  return treedef.unflatten(build(i, spec) for i, spec in enumerate(specs))


def _entry(path, shape, leaf, place) -> Entry:
  *modules, last = path
  if last in ("embedding", "head"):
    modules.append(last)
  transposed = last == "kernel"
  if last in ("embedding", "head", "kernel", "scale"):
    last = "weight"
  shape = tuple(shape[::-1] if transposed else shape)
  return Entry(".".join([*modules, last]), shape, leaf, place, transposed)
