"""The quickstart's model, trained on stretches of four windows.

  python train.py --config=configs/long_context.py

Each row reads on in its file for four windows of 256 bytes and carries its
state (truncated backpropagation through time); then it jumps to another place.
A third of the rows begin from the state that another text left. Hardware: 2 CPU
cores. Time: 10 to 20 minutes. Expected: about 1.76 bits per byte on fresh
windows, and .038 to .043 less at every later position with the state carried,
up to 64 times the window (one seed).
"""

import pathlib
import runpy

from memcomp import config


def get_config() -> config.Config:
  """Returns the experiment."""
  quickstart = pathlib.Path(__file__).with_name("quickstart.py")
  experiment = runpy.run_path(str(quickstart))["get_config"]()
  experiment.name = "long_context"
  experiment.data.packing = "stream"
  experiment.data.stretch = 4
  experiment.training.carry_state = True
  return experiment
