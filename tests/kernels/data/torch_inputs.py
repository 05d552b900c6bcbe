"""What the definitions of `torch_definitions.py` share."""

import importlib.util
import pathlib

import torch


def load(checkout, path):
  """The module at `path` of a checkout, without the package around it."""
  file = pathlib.Path(checkout) / path
  spec = importlib.util.spec_from_file_location(file.stem, file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class Sizes:
  """Axes of what is drawn; small enough to be stored, or as a layer has it."""

  def __init__(self, large):
    self.batch, self.time, self.heads = (2, 96, 3) if large else (1, 20, 2)
    self.key, self.value, self.slots = (32, 48, 24) if large else (4, 5, 3)


def logsigmoid(x):
  return torch.nn.functional.logsigmoid(torch.tensor(x)).numpy()
