"""Sessions on disk: one folder, which only fits the model that made it.

session.json   identity (config, hash of the parameters, tokenizer), tokens
arrays/        the session's arrays, by Orbax
sha256.json    checksums of all files
"""

import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from memcomp import config as config_lib
from memcomp import disk, errors, integrity, paths
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import session as session_lib
from memcomp.models import decoder
from memcomp.runs import workdir

_META, _ARRAYS, _VERSION = "session.json", "arrays", 1


class Owner(NamedTuple):
  """A model with the data that identifies it.

  Attributes:
    model: the model with its parameters.
    config: the config that it was built from.
    tokenizer: the tokenizer of its ids.
  """

  model: decoder.Decoder
  config: decoder.DecoderConfig
  tokenizer: tokenizer_lib.Tokenizer


def save(
  folder: str | os.PathLike,
  session: session_lib.Session,
  owner: Owner,
  dialogue: dict[str, Any] | None = None,
  rest: bytes = b"",
) -> int:
  """Writes a session to a folder, completely or not at all.

  Args:
    folder: folder to create.
    session: any number of texts.
    owner: the model that has read them.
    dialogue: the conversation, from `Dialogue.to_dict`; None for a text without
      messages.
    rest: bytes of a cut-off answer that were not shown yet.

  Returns:
    Bytes on disk.

  Raises:
    UserError: the folder exists, or cannot be written.
  """
  folder = pathlib.Path(paths.expand(folder)).absolute()
  disk.require_free(folder)
  meta = {
    "version": _VERSION,
    **_identity(owner),
    "tokens": np.asarray(session.position).tolist(),
    "arrays": {
      name: [list(x.shape), str(x.dtype)] for name, x in _named(session)
    },
  }
  if dialogue is not None:
    meta["dialogue"] = dialogue
  if rest:
    meta["rest"] = rest.hex()
  with disk.new_folder(folder) as partial:
    with ocp.StandardCheckpointer() as writer:
      writer.save(partial / _ARRAYS, dict(_named(session)))
    integrity.replace_text(partial / _META, json.dumps(meta, indent=1))
    integrity.write(partial)
  return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def load(folder: str | os.PathLike, owner: Owner) -> session_lib.Session:
  """Reads a session, bit for bit as it was saved.

  Args:
    folder: a folder from `save`.
    owner: the model that will continue the session.

  Raises:
    UserError: there is no session, it is damaged, or it is of another model.
  """
  folder = pathlib.Path(paths.expand(folder)).absolute()
  if not (folder / _META).is_file():
    raise errors.UserError(
      f"{folder} is no saved session: it has no {_META}; check the path"
    )
  if reason := integrity.problem(epath.Path(folder)):
    raise errors.UserError(
      f"the session {folder} is damaged ({reason}); restore it from a copy"
    )
  meta = paths.read_json(folder / _META, "restore it from a copy")
  if meta.get("version") != _VERSION:
    raise errors.UserError(
      f"{folder} was written by another version (format {meta.get('version')},"
      f" this reads {_VERSION}); use that version"
    )
  with errors.malformed(f"{folder / _META}", "restore it from a copy"):
    _check_owner(folder, meta, owner)
    sizes = {
      name: (tuple(map(int, shape)), jnp.dtype(dtype))
      for name, (shape, dtype) in meta["arrays"].items()
    }
  # The model determines the structure, but the session its sizes: it may have
  # grown.
  new = session_lib.start(owner.model)
  names = [name for name, _ in _named(new)]
  if set(names) != set(sizes):
    raise errors.UserError(
      f"{folder} was written by another version, whose memories have other"
      " arrays; use that version"
    )
  place = _placement(owner.model)
  target = {
    name: jax.ShapeDtypeStruct(*sizes[name], sharding=place) for name in names
  }
  with (
    integrity.reading(folder, f"the session {folder}"),
    ocp.StandardCheckpointer() as reader,
  ):
    found = reader.restore(folder / _ARRAYS, target)
  return jax.tree.unflatten(
    jax.tree.structure(new), [found[name] for name in names]
  )


def load_chat(folder: str | os.PathLike) -> tuple[dict[str, Any] | None, bytes]:
  """Returns `dialogue` and `rest` of a folder that `load` has read."""
  meta = _meta(folder)
  with errors.malformed(f"{folder}/{_META}", "restore it from a copy"):
    return meta.get("dialogue"), bytes.fromhex(meta.get("rest", ""))


def parameter_hash(model: decoder.Decoder) -> str:
  """Returns 16 hex digits; equal for bitwise equal parameters."""
  digest = hashlib.sha256()
  for name, x in _named(nnx.to_pure_dict(nnx.state(model))):
    x = np.ascontiguousarray(x)
    digest.update(f"{name} {x.shape} {x.dtype}".encode())
    digest.update(x.view(np.uint8).data)
  return digest.hexdigest()[:16]


def _identity(owner: Owner) -> dict[str, Any]:
  return {
    "model": config_lib.to_dict(owner.config),
    "parameters": parameter_hash(owner.model),
    "tokenizer": owner.tokenizer.fingerprint,
  }


def _check_owner(folder, saved: dict[str, Any], owner: Owner) -> None:
  changed = workdir.changes(saved["model"], owner.config, prefix="model")
  own = _identity(owner)
  if changed:
    reason = "; ".join(changed[:3]) + "; ..." * (len(changed) > 3)
  elif saved["parameters"] != own["parameters"]:
    reason = "its parameters are others, as after more training"
  elif saved["tokenizer"] != own["tokenizer"]:
    reason = "its tokenizer is another"
  else:
    return
  raise errors.UserError(
    f"{folder} is a session of another model ({reason}); open the checkpoint"
    " that it was made with"
  )


def _meta(folder: str | os.PathLike) -> dict[str, Any]:
  path = pathlib.Path(paths.expand(folder)).absolute() / _META
  return paths.read_json(path, "restore it from a copy")


def _named(tree: Any) -> list[tuple[str, Any]]:
  """Returns a tree's arrays with names, in a fixed order."""
  return [
    (jax.tree_util.keystr(path, simple=True, separator="."), x)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  ]


def _placement(model: decoder.Decoder) -> jax.sharding.Sharding:
  leaf = jax.tree.leaves(nnx.state(model))[0]
  where = leaf.sharding
  if isinstance(where, NamedSharding):
    return NamedSharding(where.mesh, PartitionSpec())
  return SingleDeviceSharding(next(iter(where.device_set)))
