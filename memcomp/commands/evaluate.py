"""Evaluates a trained model, or continues a prompt with it.

  memcomp eval --checkpoint=runs/quickstart --task=perplexity
  memcomp eval --checkpoint=runs/quickstart --task=perplexity --lengths=64
  memcomp eval --checkpoint=runs/attention --task=perplexity --rotary_scale=4
  memcomp eval --checkpoint=runs/quickstart --task=sample --prompt="def "
  memcomp eval --checkpoint=runs/quickstart --task=throughput --rows=8
  memcomp eval --checkpoint=runs/quickstart --task=niah --contexts=1024,2048
  memcomp eval --checkpoint=runs/recall-full --task=recall --gaps=24,48,96
  memcomp eval --checkpoint=runs/mqar-trellis --task=mqar
  memcomp eval --checkpoint=runs/quickstart --task=harness --tasks=piqa
  memcomp eval --checkpoint=runs/compare --task=compare
  memcomp eval --task=capacity --out=runs/capacity

perplexity prints bits per byte and perplexity, overall and by position, and
writes them as JSON and PNG. sample prints the text as it is made. chat is
`memcomp chat`. throughput times reading and making tokens behind contexts of 1k
to 128k, and writes JSON and PNG. niah hides needles in long texts and asks for
them, as RULER does. recall and mqar ask models that were trained on these
tasks, slice by slice. harness runs tasks of lm-evaluation-harness (extra eval),
from the cache alone. compare puts the runs in a folder side by side. capacity
writes pairs into Tensor Cache's memory alone and reads them. What is not given
is as in the run's config. In a clone `python eval.py` is the same program. Exit
codes: 0 done, 2 the input needs a fix.
"""

from typing import NoReturn

from absl import flags

from memcomp import cli

_CHECKPOINT = cli.DEFINE_path(
  "checkpoint",
  None,
  "Folder of a run, of its checkpoints, of one step, or of an exported model.",
)
_TASK = flags.DEFINE_string(
  "task",
  None,
  "perplexity, sample, chat, throughput, niah, recall, mqar, harness, "
  "compare, capacity.",
)
_STEP = flags.DEFINE_integer("step", None, "Which step. Default: the newest.")
_SOURCE = flags.DEFINE_string(
  "source", "", "Text to score. Default: the run's validation split."
)
_OUT = cli.DEFINE_path("out", "", "Folder for results. Default: RUN/eval.")
_SEED = flags.DEFINE_integer(
  "seed", None, "Of what is drawn. Default: 0, or the benchmark's."
)
_PROMPT_FILE = cli.DEFINE_path("prompt_file", "", "File with the prompt.")
_STOP = flags.DEFINE_multi_string(
  "stop",
  [],
  "Text that ends a sample or an answer; may be repeated.",
)
_TENSOR = flags.DEFINE_integer(
  "tensor", 1, "Devices that sample and chat split heads and features over."
)
_CONTEXTS = flags.DEFINE_list(
  "contexts",
  [],
  "Tokens before what throughput times (default: 1k to 128k), or of niah's"
  " questions (1k to 8k).",
)
_ROTARY_SCALE = flags.DEFINE_float(
  "rotary_scale",
  None,
  "Stretches rotary positions (NTK) by the length over the trained length.",
)
_SETTINGS = {
  "lengths": flags.DEFINE_integer(
    "lengths", None, "Multiples of the trained length to stream to."
  ),
  "rows": flags.DEFINE_integer("rows", None, "Texts side by side."),
  "prompt": flags.DEFINE_string("prompt", None, "Text to continue."),
  "sample_tokens": flags.DEFINE_integer("tokens", None, "Tokens to make."),
  "temperature": flags.DEFINE_float("temperature", None, "0 is greedy."),
  "top_k": flags.DEFINE_integer("top_k", None, "Likeliest tokens; 0 is all."),
  "top_p": flags.DEFINE_float("top_p", None, "Likeliest mass, in (0, 1]."),
  "min_p": flags.DEFINE_float(
    "min_p", None, "Least probability over the likeliest's, in [0, 1]."
  ),
  "repetition_penalty": flags.DEFINE_float(
    "repetition_penalty", None, "Of tokens in the text already; 1 is none."
  ),
}
# Of the tasks in modules of their own, see `evaluation.run`.
_OPTIONS: dict[str, flags.FlagHolder] = {
  "samples": flags.DEFINE_integer(
    "samples", None, "Questions, or draws, of a slice."
  ),
  "dims": flags.DEFINE_list("dims", None, "Of capacity: sizes of keys."),
  "gaps": flags.DEFINE_list("gaps", None, "Of recall: fillers to ask over."),
  "segments": flags.DEFINE_string(
    "segments", None, "Of mqar: TOKENS:PAIRS:ROWS, several joined by ;"
  ),
  "needles": flags.DEFINE_list(
    "needles",
    None,
    "Of niah: single_1, single_2, single_3. Default: all, or the trained one.",
  ),
  "essay_file": cli.DEFINE_path(
    "essay_file", None, 'Of niah: text to hide in, or JSON with a "text".'
  ),
  "word_list": cli.DEFINE_path(
    "word_list",
    None,
    "Of niah: folder of adjectivelist.txt and nounlist.txt, or wonderwords.",
  ),
  "sentences": flags.DEFINE_string(
    "sentences", None, "Of niah: what splits essays, regex or punkt (nltk)."
  ),
  "tasks": flags.DEFINE_list(
    "tasks", None, "Of harness: names of tasks and groups, or YAML files."
  ),
  "include_path": cli.DEFINE_path(
    "include_path", None, "Of harness: folder of local tasks."
  ),
  "fewshot": flags.DEFINE_integer(
    "fewshot", None, "Of harness: examples. Default: the task's."
  ),
  "limit": flags.DEFINE_integer(
    "limit", None, "Of harness: documents of a task at most."
  ),
  "rolling": flags.DEFINE_string(
    "rolling",
    None,
    "Of harness: documents are scored as one stream or window by window.",
  ),
  "allow_downloads": flags.DEFINE_bool(
    "allow_downloads", None, "Of harness: load data sets that are not cached."
  ),
}


def main() -> NoReturn:
  """Runs the command line; exits."""
  cli.main(program, usage=__doc__)


def program() -> None:
  """Runs the evaluation that the flags describe."""
  run_task(cli.require("task"))


def run_task(task: str) -> None:
  """Runs `task` as the other flags describe it."""
  if task == "compare":
    from memcomp.training import compare

    compare.run(_CHECKPOINT.value, _OUT.value)
    return
  from memcomp.evaluation import run

  given = {k: f.value for k, f in _SETTINGS.items() if f.value is not None}
  run.run(
    _CHECKPOINT.value,
    task,
    step=_STEP.value,
    source=_SOURCE.value,
    out=_OUT.value,
    seed=_SEED.value,
    prompt_file=_PROMPT_FILE.value,
    rotary_scale=_ROTARY_SCALE.value,
    stop_strings=_STOP.value,
    tensor=_TENSOR.value,
    contexts=_CONTEXTS.value,
    overrides=given,
    options={k: f.value for k, f in _OPTIONS.items() if f.value is not None},
  )


if __name__ == "__main__":
  main()
