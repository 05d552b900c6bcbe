r"""How many pairs Tensor Cache's memory holds: its Table 3, and beyond it.

  python -m memcomp.evaluation.capacity --out=runs/capacity

No checkpoint: random unit keys and normal values are written into the memory
itself (`memcomp_kernels.tensor_cache`, as it generates: what leaves a window of
one token), and read back.

first: the first pair is read after every further one. Its error is
|k_1 A_n - s v_1| / |s v_1|, s = eta lambda^(n-1) what is left of it; capacity
is the first n where that passes 1. Keys are "random", or "orthogonal": the
first key_dim of them an orthonormal basis, and then random.

all: n pairs are written by each rule, and all of them read. Accuracy is the
share whose own value has the largest cosine with what is read, of the n
values; the error is that of each pair, with its own s, as the root of the mean
square.

Exit codes: 0 done, 2 the input needs a fix.
"""

import pathlib

from absl import flags

from memcomp import cli, errors
from memcomp.evaluation import report
from memcomp.evaluation.capacity import run

_OUT = flags.DEFINE_string("out", "runs/capacity", "Folder for results.")
_DIMS = flags.DEFINE_list("dims", [str(d) for d in run.DIMS], "Sizes of keys.")
_SEEDS = flags.DEFINE_integer("seeds", 200, "Draws of each slice.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


def program() -> None:
  """Measures what the flags describe."""
  if not all(dim.isdecimal() for dim in _DIMS.value):
    raise errors.UserError(
      f"--dims={','.join(_DIMS.value)}: give whole numbers"
    )
  written_to = run.run(
    pathlib.Path(_OUT.value),
    dims=[int(dim) for dim in _DIMS.value],
    seeds=_SEEDS.value,
    seed=_SEED.value,
  )
  print("\nwritten:")
  for path in written_to:
    print(f"  {path if isinstance(path, str) else report.shown(path)}")


if __name__ == "__main__":
  cli.main(program, usage=__doc__)
