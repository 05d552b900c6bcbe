"""Reads prompts of up to a million tokens; reports peak memory and speed.

  python benchmarks/model/long_prompt.py
  python benchmarks/model/long_prompt.py --checkpoint=runs/quickstart

Without a checkpoint the model is quickstart's with random weights. Every length
runs in a process of its own: a peak does not go down again.
"""

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import app, flags, logging

ROOT = pathlib.Path(__file__).parents[2]

_CHECKPOINT = flags.DEFINE_string("checkpoint", "", "Folder of a run.")
_LENGTHS = flags.DEFINE_list(
  "lengths", ["65536", "262144", "1048576"], "Tokens of the prompts."
)
_ONE = flags.DEFINE_integer("one", 0, "Measure this length, in this process.")


def measure(length):
  """Reads a prompt of random letters that lies on disk."""
  from memcomp import cli, sharding
  from memcomp.evaluation import load
  from memcomp.inference import generate, prefill, sample
  from memcomp.inference import session as session_lib
  from memcomp.models import abstract
  from memcomp.training import state as state_lib

  if _CHECKPOINT.value:
    model = load.open_checkpoint(_CHECKPOINT.value).model
  else:
    config = cli.load_config(str(ROOT / "configs/quickstart.py"))
    params = state_lib.initial_state(config, sharding.one_device()).params
    graphdef = abstract.model_of(config.model).graphdef
    model = abstract.merge(graphdef, params)
  with tempfile.NamedTemporaryFile() as file:
    rng = np.random.default_rng(0)
    rng.integers(32, 127, length, np.uint8).tofile(file.name)
    prompt = np.memmap(file.name, np.uint8, "r")
    session = session_lib.start(model)
    compiled = prefill.read(model, session, [prompt[: prefill.PIECE]])
    compiled.logits.block_until_ready()
    before = peak()
    start = time.monotonic()
    session = prefill.read(model, session, [prompt])
    session.logits.block_until_ready()
    seconds = time.monotonic() - start
    after = peak()
    settings = sample.Settings(temperature=0.0)
    (*_, last) = generate.generate(model, session, tokens=8, settings=settings)
  return {
    "tokens": length,
    "seconds": seconds,
    "peak_before": before,
    "peak_after": after,
    "state_bytes": session_lib.num_bytes(last.session),
    "finite": bool(np.isfinite(np.asarray(last.session.logits)).all()),
  }


def peak():
  """Bytes that this process has held at once so far."""
  scale = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def main(unused):
  """Prints a row for each length."""
  if _ONE.value:
    logging.set_verbosity(logging.WARNING)
    print(json.dumps(measure(_ONE.value)))
    return
  paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
  print("| tokens | peak before | peak after | state | tokens/s |")
  print("|---:|---:|---:|---:|---:|")
  for length in _LENGTHS.value:
    command = [sys.executable, __file__, f"--one={length}"]
    command.append(f"--checkpoint={_CHECKPOINT.value}")
    done = subprocess.run(
      command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["finite"]:
      raise SystemExit(f"logits after {length} tokens are not finite")
    print(
      f"| {found['tokens']:,} | {found['peak_before'] / 2**20:.0f} MiB |"
      f" {found['peak_after'] / 2**20:.0f} MiB | {found['state_bytes']:,} B |"
      f" {found['tokens'] / found['seconds']:,.0f} |",
      flush=True,
    )


if __name__ == "__main__":
  app.run(main)
