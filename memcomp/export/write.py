"""Writes the parameters of a model for other programs or another mesh.

The folder has `config.json`, `sha256.json` (checksums of its files),
`tokenizer.json` if there is one, and the arrays: safetensors with flat names
(`names`, `tensors`), or Orbax arrays under `params`.
"""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from memcomp import config as config_lib
from memcomp import disk, errors, integrity, limits, paths, progress
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import load
from memcomp.export import names, read, tensors
from memcomp.models import abstract

DTYPES = {
  "float32": np.dtype(np.float32),
  "bfloat16": np.dtype(jnp.bfloat16),
}


def export(
  checkpoint: str | os.PathLike,
  out: str | os.PathLike,
  *,
  format: str = "safetensors",
  dtype: str = "float32",
  shard_bytes: int = 5_000_000_000,
  step: int | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> pathlib.Path:
  """Writes a model to a new folder, which is complete or absent.

  Args:
    checkpoint: folder of a run, of its `checkpoints`, of one step, of an
      export, or in the Hugging Face layout.
    out: the folder to create.
    format: "safetensors" or "orbax".
    dtype: dtype of the arrays in safetensors, "float32" or "bfloat16".
    shard_bytes: maximum bytes of arrays per safetensors file.
    step: step of a run; None is the newest complete one.
    mesh: mesh for reading the parameters; None is one device.

  Returns:
    `out` as an absolute path.

  Raises:
    UserError: no checkpoint, `out` exists, bad settings, or a full disk.
  """
  paths.check_local("out", out)
  out = pathlib.Path(out).absolute()
  _check(format, dtype, shard_bytes)
  disk.require_free(out)
  opened = load.open_checkpoint(checkpoint, step, mesh)
  params = abstract.plain(nnx.split(opened.model)[1])
  with disk.new_folder(out) as folder:
    if format == "orbax":
      with ocp.StandardCheckpointer() as writer:
        writer.save(folder / read.ORBAX, params)
    else:
      _write_tensors(
        folder, opened.config.model, params, DTYPES[dtype], shard_bytes
      )
    _write_config(folder, opened, format, dtype)
    integrity.write(folder)
  return out


def _check(format: str, dtype: str, shard_bytes: int) -> None:
  for name, value, choices in (
    ("format", format, read.FORMATS),
    ("dtype", dtype, DTYPES),
  ):
    if value not in choices:
      raise errors.UserError(
        f"--{name}={value} is unknown; give one of: {', '.join(choices)}"
      )
  if format == "orbax" and dtype != "float32":
    raise errors.UserError(
      f"--dtype={dtype} is of safetensors; Orbax's arrays stay float32"
    )
  limits.check("--shard_bytes", shard_bytes, 1, 2**63 - 1)


def _write_tensors(folder, config, params, dtype, shard_bytes) -> None:
  leaves = jax.tree.leaves(params)
  entries = names.entries(config, params)
  shown = progress.Progress("exporting arrays", len(entries))

  def item(entry: names.Entry) -> tensors.Item:
    def get() -> np.ndarray:
      shown.advance()
      return names.take(leaves, entry).astype(dtype)

    size = int(np.prod(entry.shape)) * dtype.itemsize
    return tensors.Item(entry.name, size, get)

  items = [item(entry) for entry in entries]
  tensors.write(folder, items, shard_bytes=shard_bytes)


def _write_config(
  folder: pathlib.Path, opened: load.Checkpoint, format: str, dtype: str
) -> None:
  """Writes the config, from which `read.load` rebuilds the model."""
  config = config_lib.to_dict(opened.config)
  if isinstance(opened.tokenizer, tokenizer_lib.JsonTokenizer):
    (folder / read.TOKENIZER).write_bytes(opened.tokenizer.content)
    config["data"]["tokenizer"] = read.TOKENIZER
  meta: dict[str, Any] = {
    **opened.meta,
    "format": read.FORMAT,
    "format_version": read.VERSION,
    "arrays": format,
    "dtype": dtype,
    "step": opened.step,
    "config": config,
  }
  integrity.replace_text(
    folder / read.CONFIG, json.dumps(meta, indent=2) + "\n"
  )
