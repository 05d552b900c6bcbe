r"""Replaces the attention of a trained model by a memory.

  memcomp convert --checkpoint=runs/attention --mixer=trellis \
    --workdir=runs/trellis --distill_steps=300 --steps=500
  memcomp train --config=run:runs/trellis --workdir=runs/trellis

Everything but the mixers is kept, and those of their projections that fit.
Layer-wise distillation then trains each new mixer to reproduce the old one's
outputs. The result is a run, which the second command trains further, end to
end. The new mixer has the heads and widths of the old one; other fields are set
as in --mixer=trellis:num_slots=32,chunk_size=16. --checkpoint also accepts a
Llama or Qwen2 checkpoint. The workdir is complete or absent. Exit codes: 0
done, 2 the input needs a fix, 130 interrupted (nothing is kept).
"""

from typing import NoReturn

from absl import flags

from memcomp import cli, limits

_CHECKPOINT = cli.DEFINE_path(
  "checkpoint", None, "Folder of a run, an export, or a checkpoint."
)
_STEP = flags.DEFINE_integer(
  "step", None, "Step of the run to read. Default: the newest."
)
_WORKDIR = cli.DEFINE_path("workdir", None, "Folder to create for the run.")
_MIXER = flags.DEFINE_string(
  "mixer", None, "The new mixer: NAME, or NAME:FIELD=VALUE,FIELD=VALUE."
)
_LAYERS = flags.DEFINE_list(
  "layers", None, "Layers to convert, from 0, comma-separated. Default: all."
)
_DISTILL_STEPS = flags.DEFINE_integer(
  "distill_steps", 200, "Steps of layer-wise distillation; 0 for none."
)
_DISTILL_RATE = flags.DEFINE_float(
  "distill_learning_rate", 3e-3, "Peak learning rate of the distillation."
)
_FSDP = flags.DEFINE_integer("fsdp", 1, "Devices to shard over.", 1)
_OF_RUN = {
  "training.steps": flags.DEFINE_integer(
    "steps", None, "Steps of memcomp train afterwards."
  ),
  "training.batch_size": flags.DEFINE_integer(
    "batch_size", None, "Rows per step."
  ),
  "optimizer.learning_rate": flags.DEFINE_float(
    "learning_rate", None, "Peak learning rate of memcomp train."
  ),
  "data.source": flags.DEFINE_string("source", None, "Text to train on."),
  "data.validation": flags.DEFINE_string(
    "validation", None, "Text to validate on. Default: a share of --source."
  ),
  "data.sequence_length": flags.DEFINE_integer(
    "sequence_length", None, "Tokens per row."
  ),
}
"""Fields of the run's config; the checkpoint's config provides the others."""


def main() -> NoReturn:
  """Runs the command line; exits."""
  cli.main(program, usage=__doc__)


def program() -> None:
  """Runs the conversion that the flags describe."""
  checkpoint = cli.require("checkpoint")
  workdir, mixer = cli.require("workdir"), cli.require("mixer")
  from memcomp.convert import convert

  convert.convert(
    checkpoint,
    workdir,
    mixer,
    step=_STEP.value,
    layers=_depths(_LAYERS.value),
    distill_steps=_DISTILL_STEPS.value,
    distill_learning_rate=_DISTILL_RATE.value,
    overrides={
      path: flag.value
      for path, flag in _OF_RUN.items()
      if flag.value is not None
    },
    fsdp=_FSDP.value,
  )


def _depths(layers: list[str] | None) -> list[int] | None:
  if layers is None:
    return None
  return limits.whole_numbers("--layers", layers, 0)


if __name__ == "__main__":
  main()
