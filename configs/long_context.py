"""The quickstart's model with state carried across consecutive windows.

  python train.py --config=configs/long_context.py

Each row of the batch continues in its file where the last step stopped
(truncated backpropagation through windows of 256 bytes). So training shows the
memory contexts longer than a window. Hardware: 2 CPU cores. Time: about 10
minutes. Expected: bits per byte do not rise up to 16 times the window. They are
about 1.84 at positions 2,048 to 4,095. The price is 0.3 more than the
quickstart's on fresh windows of 256 (one seed).
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
