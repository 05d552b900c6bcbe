"""Reads an exported model, on any mesh; no training code, no run."""

import json
import os
import pathlib
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, paths, sharding
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.export import names, tensors
from memcomp.models import decoder
from memcomp.training import integrity, workdir
from memcomp.training import state as state_lib

FORMAT = "memcomp"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
ORBAX = "params"


class Exported(NamedTuple):
  """A model that was exported.

  Attributes:
    model: with float32 parameters.
    tokenizer: the one it was trained with.
    config: of its run; `data.tokenizer` is the file in the folder.
    meta: `config.json`, see `write.export`.
  """

  model: decoder.Decoder
  tokenizer: tokenizer_lib.Tokenizer
  config: config_lib.Config
  meta: dict[str, Any]


def settings(path: str | os.PathLike, name: str = CONFIG) -> dict[str, Any]:
  """Returns a folder's `config.json`, or `name`; empty where there is none."""
  if paths.is_remote(path):
    return {}
  try:
    text = (pathlib.Path(path) / name).read_text(encoding="utf-8")
    found = json.loads(text)
  except (OSError, *errors.BAD_JSON):
    return {}
  return found if isinstance(found, dict) else {}


def is_export(path: str | os.PathLike) -> bool:
  """Whether a folder holds an exported model."""
  return settings(path).get("format") == FORMAT


def config_of(path: str | os.PathLike) -> config_lib.Config:
  """Returns the config of an exported model's run, with its own tokenizer.

  Raises:
    UserError: damaged, or of a version to come.
  """
  folder = pathlib.Path(path).absolute()
  with errors.malformed(f"{folder / CONFIG}", "restore it from a copy"):
    config = workdir.config_of(settings(folder)["config"], str(folder))
  if config.data.tokenizer == TOKENIZER:
    config.data.tokenizer = str(folder / TOKENIZER)
  return config


def load(path: str | os.PathLike, mesh: Mesh | None = None) -> Exported:
  """Reads what `write.export` wrote, of either format.

  Args:
    path: the folder.
    mesh: to put the parameters on; None is one device.

  Raises:
    UserError: nothing exported there, damaged, or of a version to come.
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
  config = config_of(folder)
  with errors.malformed(f"{folder / CONFIG}", "restore it from a copy"):
    model = state_lib.abstract_model(config.model)
    kind, _, _ = meta["arrays"], int(meta["step"]), int(meta["param_count"])
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  tokenizer.ends = tuple(meta.get("ends", tokenizer.ends))
  if mesh is None:
    mesh = sharding.one_device()
  if kind == "orbax":
    with ocp.StandardCheckpointer() as reader:
      params = reader.restore(
        folder / ORBAX, state_lib.abstract_params(model, mesh)
      )
  else:
    with tensors.opened(folder) as arrays:
      params = names.unflatten(config.model, arrays, mesh)
  return Exported(
    state_lib.merge(model.graphdef, params), tokenizer, config, meta
  )
