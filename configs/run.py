"""The experiment of a run's folder, to continue it.

  python train.py --config=configs/run.py:runs/trellis --workdir=runs/trellis

For runs from a program such as python -m memcomp.convert, which have no config
file. Hardware, time: the run's. Expected: it continues from its newest
checkpoint.
"""

from memcomp import config, errors
from memcomp.runs import workdir


def get_config(folder: str = "") -> config.Config:
  """Returns the config that the run in `folder` started with."""
  if not folder:
    raise errors.UserError("write --config=configs/run.py:FOLDER of a run")
  return workdir.saved_config(folder)
