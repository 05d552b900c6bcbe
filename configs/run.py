r"""The experiment of a run's folder, to continue it or to begin another.

  python train.py --config=configs/run.py:runs/trellis --workdir=runs/trellis
  python train.py --config=configs/run.py:runs/trellis \
    --init_from=runs/trellis --workdir=runs/longer \
    --config.data.sequence_length=1024

The first command resumes from the newest checkpoint of a run that a program
such as python -m memcomp.convert wrote, without a config file. The second
begins a new run with the parameters of any run. The folder may also be an
export, or a Llama or Qwen2 checkpoint. Hardware, time: the run's. Expected: the
second prints where its parameters are from, with a digest of the files.
"""

from memcomp import config, errors
from memcomp.evaluation import load


def get_config(folder: str = "") -> config.Config:
  """Returns the config of the model in `folder`."""
  if not folder:
    raise errors.UserError("write --config=run:FOLDER of a run")
  return load.config_of(folder)
