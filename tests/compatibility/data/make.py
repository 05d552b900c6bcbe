"""Makes `by_letters.tar.xz`: a run, a session and an export of `hybrid.py`.

  git worktree add OLD 3a468b7
  cp tests/compatibility/data/{make,hybrid}.py OLD
  cd OLD && PYTHONPATH=.:kernels python make.py /by_letters

Only with that commit, the last whose mixers had no names: what it wrote is
what later versions have to read.
"""

import json
import pathlib
import subprocess
import sys
import tarfile

import jax
import numpy as np

from memcomp.evaluation import load
from memcomp.export import write
from memcomp.inference import prefill, saved
from memcomp.inference import session as session_lib


def main(out):
  """Writes all of it into the folder `out`, then the archive beside it."""
  out = pathlib.Path(out).absolute()
  run = out / "run"
  subprocess.run(
    [sys.executable, "train.py", "--config=hybrid.py", f"--workdir={run}"],
    check=True,
  )
  for path in (run / ".lock", run / "metrics.jsonl", run / "loss.png"):
    path.unlink()
  opened = load.open_checkpoint(run)
  tokens = np.arange(1, 22)[None] * 11 % 256
  hidden, _ = jax.jit(opened.model.__call__)(tokens)
  session = session_lib.start(opened.model)
  session = prefill.read(opened.model, session, [tokens[0]], piece_tokens=16)
  owner = saved.Owner(opened.model, opened.config.model, opened.tokenizer)
  saved.save(out / "session", session, owner)
  write.export(run, out / "export")
  expected = {
    "tokens": tokens[0].tolist(),
    "last_logits": np.asarray(opened.model.logits(hidden))[0, -1].tolist(),
  }
  (out / "expected.json").write_text(json.dumps(expected) + "\n")

  def anonymous(info):
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info

  with tarfile.open(out.parent / "by_letters.tar.xz", "w:xz") as archive:
    archive.add(out, ".", filter=anonymous)


if __name__ == "__main__":
  main(sys.argv[1])
