"""Writes the parameters of a model for other programs, or for another mesh.

A folder with `config.json`, `sha256.json` (the checksums of its files), the
`tokenizer.json` where there is one, and the arrays: as safetensors under flat
names (`names`, `tensors`), or as Orbax's under `params`.
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

FORMATS = ("safetensors", "orbax")
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
  """Writes a model to a new folder, which is whole or absent.

  Args:
    checkpoint: a run's folder, its `checkpoints` folder or one step's, an
      exported folder, or one in the layout of Hugging Face.
    out: the folder to make.
    format: "safetensors" or "orbax".
    dtype: of the arrays, "float32" or "bfloat16"; of safetensors.
    shard_bytes: of the arrays of one safetensors file at most.
    step: of a run; None is the newest that is whole.
    mesh: that the parameters are read on; None is one device.

  Returns:
    `out`, absolute.

  Raises:
    UserError: no checkpoint, `out` is there, bad settings, a full disk.
  """
  if paths.is_remote(out):
    raise errors.UserError(
      f"--out={out}: a bucket has no renames, so an export there could be left"
      " half made; write it to this machine and copy it"
    )
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
    ("format", format, FORMATS),
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
  """Writes what `read.load` rebuilds the model from."""
  config = config_lib.to_dict(opened.config)
  if isinstance(opened.tokenizer, tokenizer_lib.JsonTokenizer):
    (folder / read.TOKENIZER).write_bytes(opened.tokenizer.content)
    config["data"]["tokenizer"] = read.TOKENIZER
  meta: dict[str, Any] = {
    **opened.meta,
    "format": read.FORMAT,
    "format_version": 1,
    "arrays": format,
    "dtype": dtype,
    "step": opened.step,
    "config": config,
  }
  integrity.replace_text(
    folder / read.CONFIG, json.dumps(meta, indent=2) + "\n"
  )
