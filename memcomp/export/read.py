"""Reads an exported model onto any mesh, without a run."""

import os
import pathlib
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, integrity, paths, sharding
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.export import names, tensors
from memcomp.models import abstract, decoder
from memcomp.runs import workdir

FORMAT = "memcomp"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
ORBAX = "params"
FORMATS = ("safetensors", "orbax")
"""Of the arrays: `arrays` of `config.json`."""

VERSION = 1
"""Of the folder: `format_version` of `config.json`."""


class Exported(NamedTuple):
  """An exported model.

  Attributes:
    model: the model with float32 parameters.
    tokenizer: the tokenizer of its training.
    config: config of its run; `data.tokenizer` is the file in the folder.
    meta: contents of `config.json`, see `write.export`.
  """

  model: decoder.Decoder
  tokenizer: tokenizer_lib.Tokenizer
  config: config_lib.Config
  meta: dict[str, Any]


def settings(path: str | os.PathLike, name: str = CONFIG) -> dict[str, Any]:
  """Returns a folder's `config.json`, or `name`; empty if there is none.

  Raises:
    UserError: it is no JSON object, in a folder with arrays. In others, such as
      a run's, it does not decide what the folder is.
  """
  if paths.is_remote(path):
    return {}
  folder = pathlib.Path(path)
  try:
    return paths.read_json(folder / name, "restore it from a copy")
  except (OSError, ValueError):  # ValueError for a null byte
    return {}
  except errors.UserError:
    if (folder / ORBAX).exists() or any(folder.glob("*.safetensors")):
      raise
    return {}


def is_export(path: str | os.PathLike) -> bool:
  """Whether a folder has an exported model."""
  return settings(path).get("format") == FORMAT


def config_of(path: str | os.PathLike) -> config_lib.Config:
  """Returns the config of an exported model's run, with its tokenizer.

  Raises:
    UserError: it is damaged, or of a later version.
  """
  folder = pathlib.Path(path).absolute()
  with errors.malformed(f"{folder / CONFIG}", "restore it from a copy"):
    config = workdir.config_of(settings(folder)["config"], str(folder))
  if config.data.tokenizer == TOKENIZER:
    config.data.tokenizer = str(folder / TOKENIZER)
  return config


def load(path: str | os.PathLike, mesh: Mesh | None = None) -> Exported:
  """Reads an export of `write.export` in either format.

  Args:
    path: the folder.
    mesh: mesh for the parameters; None is one device.

  Raises:
    UserError: there is no export, it is damaged, or of a later version.
  """
  folder = pathlib.Path(path).absolute()
  meta = settings(folder)
  if meta.get("format") != FORMAT:
    raise errors.UserError(
      f"{folder} is not an exported model; make one with python -m"
      " memcomp.export"
    )
  if problem := integrity.problem(paths.of(folder)):
    raise errors.UserError(
      f"{folder} is damaged ({problem}); restore it from a copy"
    )
  if (version := meta.get("format_version")) != VERSION:
    raise errors.UserError(
      f"{folder} is in another version of the format ({version}, not"
      f" {VERSION}); read it with the version of memcomp that wrote it"
    )
  config = config_of(folder)
  with errors.malformed(f"{folder / CONFIG}", "restore it from a copy"):
    model = abstract.model_of(config.model)
    kind, _, _ = meta["arrays"], int(meta["step"]), int(meta["param_count"])
    if kind not in FORMATS:
      raise ValueError(f"arrays={kind!r}")
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  with errors.malformed(f"{folder / CONFIG}", "restore it from a copy"):
    tokenizer_lib.take_ends(tokenizer, meta)
  if mesh is None:
    mesh = sharding.one_device()
  if kind == "orbax":
    with (
      integrity.reading(folder, str(folder)),
      ocp.StandardCheckpointer() as reader,
    ):
      params = reader.restore(folder / ORBAX, abstract.params_of(model, mesh))
  else:
    with tensors.opened(folder) as arrays:
      known = {entry.name for entry in names.entries(config.model)}
      arrays.check_all_in(known, "the model of its config.json")
      params = names.unflatten(config.model, arrays, mesh)
  return Exported(
    abstract.merge(model.graphdef, params), tokenizer, config, meta
  )
