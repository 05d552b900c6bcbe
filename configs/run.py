"""The experiment of a run's folder, to go on with it.

  python train.py --config=configs/run.py:runs/trellis --workdir=runs/trellis

For runs that a program wrote, as python -m memcomp.convert does, and that so
have no config file of their own. Hardware, time: the run's. Expected: it goes
on from its newest checkpoint.
"""

from memcomp import config, errors
from memcomp.runs import workdir


def get_config(folder: str = "") -> config.Config:
  """Returns the config that the run in `folder` was begun with."""
  if not folder:
    raise errors.UserError("write --config=configs/run.py:FOLDER of a run")
  return workdir.saved_config(folder)
