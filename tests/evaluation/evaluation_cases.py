"""A tiny model, text and checkpoint for the tests of evaluation."""

import pathlib

from runs import random_params as tiny_params
from runs import save

from memcomp import config as config_lib
from memcomp.layers import trellis
from memcomp.models import decoder

__all__ = ["is_figure", "save", "tiny_config", "tiny_params", "write_text"]


def tiny_config(**data) -> config_lib.Config:
  return config_lib.Config(
    name="tiny",
    seed=7,
    model=decoder.DecoderConfig(
      d_model=32,
      num_layers=2,
      mlp_dim=48,
      embedding_convolution=4,
      mixers={
        "memory": trellis.TrellisConfig(
          heads=2, key_dim=8, value_dim=8, num_slots=8, chunk_size=8
        )
      },
    ),
    data=config_lib.DataConfig(sequence_length=32, **data),
  )


def write_text(folder) -> str:
  """Writes some documents; returns the folder as a source."""
  folder.mkdir()
  for number in range(30):
    lines = [f"line {i} of document {number}\n" for i in range(10 + number)]
    (folder / f"{number}.txt").write_text("".join(lines))
  return str(folder)


def is_figure(path: pathlib.Path) -> bool:
  from matplotlib import image

  pixels = image.imread(path)
  return min(pixels.shape[:2]) > 300 and pixels.std() > 0.05
