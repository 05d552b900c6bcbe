"""Starts a new run from the parameters of another one.

Parameters depend only on the model. So sequence length, packing, data,
optimizer, schedule, mesh, dtype and state passing may differ from those of the
source: a run, export or Hugging Face checkpoint. Arrays are matched by flat
name (`export.names`), whatever the layers' pattern is called.
"""

import functools
from typing import Any, NamedTuple

import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx
from optax import contrib

from memcomp import config as config_lib
from memcomp import errors, integrity, paths
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import load
from memcomp.export import names
from memcomp.models import abstract
from memcomp.runs import load as load_lib
from memcomp.runs import workdir
from memcomp.training import state as state_lib

_TABLES = ("embedding.weight", "head.weight")
_SHOWN = 4
"""Maximum number of array names in a message."""


class Begun(NamedTuple):
  """The start of a new run.

  Attributes:
    state: state on the mesh, at step 0.
    record: its origin, for JSON; see `begin`.
    meta: metadata of the source.
  """

  state: state_lib.TrainState
  record: dict[str, Any]
  meta: dict[str, Any]


def begin(
  config: config_lib.Config,
  mesh: jax.sharding.Mesh,
  tokenizer: tokenizer_lib.Tokenizer,
) -> Begun:
  """Returns the state before the first step, from `training.init_from`.

  The optimizer is fresh. With `training.keep_optimizer`, its moments and
  their count come from the source, but the schedule starts anew.

  Args:
    config: validated config with `training.init_from`.
    mesh: mesh in use.
    tokenizer: tokenizer of the run.

  Returns:
    The state, the source's metadata, and a record: `path`, `step`, `sha256` (of
    the files; None in a bucket), `optimizer` ("fresh" or "kept"), and `changes`
    (differing fields of the model). With `training.init_partially` also the
    arrays that are `fresh` here, and those of the source that are `left_out`.

  Raises:
    UserError: there is nothing to read, or arrays do not fit (it names them).
  """
  training = config.training
  where = paths.expand(training.init_from)
  opened = load.open_checkpoint(where, mesh=mesh)
  source = opened.config.model
  mine = {e.name: e for e in names.entries(config.model)}
  theirs = {e.name: e for e in names.entries(source)}
  taken = [
    name
    for name in mine.keys() & theirs.keys()
    if mine[name].shape == theirs[name].shape
  ]
  if opened.tokenizer.fingerprint != tokenizer.fingerprint:
    taken = [name for name in taken if name not in _TABLES]
  taken = sorted(taken)
  fresh = sorted(mine.keys() - set(taken))
  left_out = sorted(theirs.keys() - set(taken))
  if (fresh or left_out) and not training.init_partially:
    raise errors.UserError(_misfit(config, opened, mine, theirs, fresh))
  if not taken:
    raise errors.UserError(
      f"training.init_from = {training.init_from!r}: none of its arrays fits"
      " this model; leave it out"
    )
  opt_state = None
  if training.keep_optimizer:
    opt_state = _moments(config, where, mesh, opened, mine, theirs)
  state = _start(config, mesh, opened, mine, theirs, taken, opt_state)
  record: dict[str, Any] = {
    "path": where,
    "step": opened.step,
    "sha256": _digest(where, opened.step),
    "optimizer": "kept" if training.keep_optimizer else "fresh",
    "changes": workdir.changes(
      config_lib.to_dict(source), config.model, prefix="model"
    ),
  }
  if training.init_partially:
    record |= {"fresh": fresh, "left_out": left_out}
  return Begun(state, record, opened.meta)


def describe(record: dict[str, Any]) -> str:
  """Returns a record as printable lines."""
  digest = record["sha256"]
  lines = [
    f"from {record['path']}, step {record['step']}"
    + (f", sha256 {digest[:16]}" if digest else "")
    + f"; optimizer {record['optimizer']}"
  ]
  if record["changes"]:
    lines.append(f"another model: {'; '.join(record['changes'])}")
  for key, what in (
    ("fresh", "arrays start fresh"),
    ("left_out", "arrays of the source are left out"),
  ):
    if found := record.get(key):
      lines.append(f"{len(found)} {what}: {_some(found)}")
  return "\n".join(lines)


def _misfit(config, opened, mine, theirs, fresh) -> str:
  """Returns the error about arrays that do not fit, in one line."""
  shared = mine.keys() & theirs.keys()
  tables = [name for name in _TABLES if name in fresh and name in shared]
  shapes = sorted(
    f"{name} {list(theirs[name].shape)}, here {list(mine[name].shape)}"
    for name in shared
    if mine[name].shape != theirs[name].shape
  )
  found = []
  if shapes:
    found.append(f"of another shape: {_some(shapes)}")
  elif tables:
    found.append(
      f"of another tokenizer than {config.data.tokenizer!r}:"
      f" {_some(tables)} (its data.tokenizer is"
      f" {opened.config.data.tokenizer!r})"
    )
  for what, lacking in (
    ("missing in the source", mine.keys() - shared),
    ("only in the source", theirs.keys() - shared),
  ):
    if lacking:
      found.append(f"{what}: {_some(sorted(lacking))}")
  return (
    f"training.init_from = {config.training.init_from!r} does not fit this"
    f" model; arrays {'; '.join(found)}; use the source's model"
    " (--config=run:FOLDER), or load what fits with --init_partially"
  )


def _some(found: list[str]) -> str:
  more = len(found) - _SHOWN
  return ", ".join(found[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _start(config, mesh, opened, mine, theirs, taken, opt_state):
  """Returns a state at step 0 with the arrays `taken`."""
  model = abstract.model_of(config.model)
  target = state_lib.abstract_state(config, mesh)
  tx = state_lib.make_optimizer(config, model)

  @functools.partial(
    jax.jit,
    out_shardings=abstract.shardings_of(target),
    donate_argnums=0,
  )
  def replaced(start, params, opt_state):
    leaves, tree = jax.tree.flatten(start.params)
    old = jax.tree.leaves(params)
    for name in taken:
      to, of = mine[name], theirs[name]
      array = old[of.leaf] if of.place is None else old[of.leaf][of.place]
      if to.place is not None:
        array = leaves[to.leaf].at[to.place].set(array)
      leaves[to.leaf] = array.astype(leaves[to.leaf].dtype)
    params = tree.unflatten(leaves)
    own = tx.init(params) if opt_state is None else opt_state
    carry = state_lib.initial_carry(
      config, model, params, config.training.batch_size
    )
    return start._replace(params=params, opt_state=own, carry=carry)

  params = abstract.plain(nnx.split(opened.model)[1])
  start = state_lib.initial_state(config, mesh)
  if opt_state is not None:
    opt_state = _with_moments(start.opt_state, opt_state)
    start = start._replace(opt_state=())
  return replaced(start, params, opt_state)


def _moments(config, where, mesh, opened, mine, theirs) -> list[Any]:
  """Returns moments and their counts from the checkpoint of a run."""
  try:
    root, _ = load_lib.locate(where)
  except errors.UserError as error:
    raise errors.UserError(
      f"--keep_optimizer: {where} holds no optimizer, which only the"
      " checkpoint of a run does; leave the flag out"
    ) from error
  here, there = (c.optimizer.name for c in (config, opened.config))
  if here != there:
    raise errors.UserError(
      f"--keep_optimizer: the moments in {where} are of {there}, and"
      f" optimizer.name is {here}; leave the flag out, or set"
      f" optimizer.name to {there}"
    )
  places = [
    {name: (e.leaf, e.place) for name, e in side.items()}
    for side in (mine, theirs)
  ]
  if config.training.init_partially or places[0] != places[1]:
    raise errors.UserError(
      f"--keep_optimizer: the moments in {where} belong to a model whose layers"
      " are stacked differently; leave the flag out, or use the source's model"
      " (--config=run:FOLDER)"
    )
  target = state_lib.abstract_state(opened.config, mesh)
  # The carry is not needed here, and this mesh need not divide its rows.
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  target = target._replace(
    carry=jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
      target.carry,
    )
  )
  rest = {k: v for k, v in target._asdict().items() if v is not None}
  del rest["params"]
  with (
    errors.malformed(
      f"the optimizer in {root / str(opened.step)}", "restore it from a copy"
    ),
    ocp.StandardCheckpointer() as reader,
  ):
    found = reader.restore(root / str(opened.step) / "state", rest)
  leaves = jax.tree.leaves(found["opt_state"], is_leaf=_are_moments)
  return [x for x in leaves if _are_moments(x)]


def _are_moments(x: Any) -> bool:
  return isinstance(x, optax.ScaleByAdamState | contrib.MuonState)


def _with_moments(opt_state: Any, moments: list[Any]) -> Any:
  """Replaces the moments of an optimizer state; its schedule is at 0."""
  rest = iter(moments)
  return jax.tree.map(
    lambda x: next(rest) if _are_moments(x) else x,
    opt_state,
    is_leaf=_are_moments,
  )


def _digest(path: str, step: int) -> str | None:
  """Returns a digest of the files in use; None in a bucket."""
  if paths.is_remote(path):
    return None
  folder = paths.of(path)
  try:
    root, _ = load_lib.locate(path)
    folder = root / str(step)
  except errors.UserError:
    pass  # an export has its own folder
  return integrity.digest(folder)
