"""Writes a trained model as files for other programs or another mesh.

  memcomp export --checkpoint=runs/quickstart --out=quickstart
  memcomp export --checkpoint=runs/lm --out=lm --dtype=bfloat16
  memcomp export --checkpoint=runs/lm --out=lm --format=orbax

The folder is complete or absent: an interrupted export leaves nothing, and
nothing is overwritten. memcomp eval accepts the folder as --checkpoint.
--checkpoint also accepts a folder in the Hugging Face layout (Llama, Qwen2).
Exit codes: 0 done, 2 the input needs a fix, 130 interrupted.
"""

from typing import NoReturn

from absl import flags

from memcomp import cli

_CHECKPOINT = cli.DEFINE_path(
  "checkpoint", None, "Folder of a run, of its checkpoints, or of one step."
)
_OUT = cli.DEFINE_path("out", None, "Folder to create.")
_FORMAT = flags.DEFINE_string("format", "safetensors", "safetensors or orbax.")
_DTYPE = flags.DEFINE_string(
  "dtype", "float32", "Dtype of safetensors arrays: float32 or bfloat16."
)
_SHARD_BYTES = flags.DEFINE_integer(
  "shard_bytes", 5_000_000_000, "Maximum bytes per safetensors file."
)
_STEP = flags.DEFINE_integer("step", None, "Step to read. Default: the newest.")


def main() -> NoReturn:
  """Runs the command line; exits."""
  cli.main(program, usage=__doc__)


def program() -> None:
  """Writes the export that the flags describe."""
  checkpoint, out = cli.require("checkpoint"), cli.require("out")
  from memcomp.export import write

  folder = write.export(
    checkpoint,
    out,
    format=_FORMAT.value,
    dtype=_DTYPE.value,
    shard_bytes=_SHARD_BYTES.value,
    step=_STEP.value,
  )
  files = [path for path in folder.rglob("*") if path.is_file()]
  size = sum(path.stat().st_size for path in files)
  print(f"written: {folder}, {len(files)} files, {size:,} bytes")


if __name__ == "__main__":
  main()
