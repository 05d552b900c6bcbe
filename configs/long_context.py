"""The quickstart's model, its state carried across consecutive windows.

  python train.py --config=configs/long_context.py

Each row of the batch reads on in its file where the last step stopped
(truncated backpropagation through windows of 256 bytes), so that the memory
meets contexts longer than a window. Hardware: 2 CPU cores. Time: about 10
minutes. Expected: bits per byte that do not rise up to 16 times the window,
about 1.84 at 2,048 to 4,095, for 0.3 more on fresh windows of 256 (one seed).
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
  experiment.training.carry_state = True
  experiment.training.state_passing = 0.0
  experiment.evaluation.lengths = 16
  return experiment
