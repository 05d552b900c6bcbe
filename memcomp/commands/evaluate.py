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
writes them as JSON and PNG. sample prints a continuation as it is made. chat is
`memcomp chat`. throughput times prefill and decoding after contexts of 1k to
128k tokens, and writes JSON and PNG. niah hides needles in long texts and asks
for them, like RULER. recall and mqar test models that were trained on these
tasks, slice by slice. harness runs tasks of lm-evaluation-harness (extra eval)
from the cache only. compare puts the runs in a folder side by side. capacity
tests Tensor Cache's memory alone: it writes pairs and reads them. Defaults come
from the run's config. In a clone, `python eval.py` is the same program. Exit
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
_STEP = flags.DEFINE_integer("step", None, "Step to read. Default: the newest.")
_SOURCE = flags.DEFINE_string(
  "source",
  "",
  "Text to score: paths joined by commas. Default: the run's validation split.",
)
_OUT = cli.DEFINE_path("out", "", "Folder for results. Default: RUN/eval.")
_SEED = flags.DEFINE_integer(
  "seed", None, "Seed of the draws. Default: 0, or the benchmark's."
)
_PROMPT_FILE = cli.DEFINE_path("prompt_file", "", "File with the prompt.")
_STOP = flags.DEFINE_multi_string(
  "stop",
  [],
  "Text that ends a sample or an answer; may be repeated.",
)
_TENSOR = flags.DEFINE_integer(
  "tensor", 1, "Devices over which sample and chat shard heads and features."
)
_CONTEXTS = flags.DEFINE_list(
  "contexts",
  [],
  "Context lengths in tokens of throughput (default: 1k to 128k) or niah"
  " (1k to 8k).",
)
_ROTARY_SCALE = flags.DEFINE_float(
  "rotary_scale",
  None,
  "Stretches rotary positions (NTK): the length over the trained length.",
)
_SETTINGS = {
  "lengths": flags.DEFINE_integer(
    "lengths", None, "Multiples of the trained length to stream to."
  ),
  "rows": flags.DEFINE_integer("rows", None, "Number of parallel texts."),
  "prompt": flags.DEFINE_string("prompt", None, "Text to continue."),
  "sample_tokens": flags.DEFINE_integer("tokens", None, "Tokens to generate."),
  "temperature": flags.DEFINE_float(
    "temperature", None, "Sampling temperature; 0 takes the likeliest token."
  ),
  "top_k": flags.DEFINE_integer(
    "top_k", None, "Sample from this many likeliest tokens; 0 is all."
  ),
  "top_p": flags.DEFINE_float(
    "top_p",
    None,
    "Sample from the likeliest tokens of this total probability, in (0, 1].",
  ),
  "min_p": flags.DEFINE_float(
    "min_p", None, "Minimum probability over the maximum, in [0, 1]."
  ),
  "repetition_penalty": flags.DEFINE_float(
    "repetition_penalty", None, "Penalty of tokens in the text; 1 is none."
  ),
}
# Options of tasks in separate modules, see `evaluation.run`.
_OPTIONS: dict[str, flags.FlagHolder] = {
  "samples": flags.DEFINE_integer(
    "samples", None, "Questions or draws per slice."
  ),
  "dims": flags.DEFINE_list("dims", None, "capacity: key sizes."),
  "gaps": flags.DEFINE_list("gaps", None, "recall: gaps, in fillers."),
  "segments": flags.DEFINE_string(
    "segments", None, "mqar: TOKENS:PAIRS:ROWS, several joined by ;"
  ),
  "needles": flags.DEFINE_list(
    "needles",
    None,
    "niah: single_1, single_2, single_3. Default: all, or the trained one.",
  ),
  "essay_file": cli.DEFINE_path(
    "essay_file", None, 'niah: haystack text, or JSON with a "text".'
  ),
  "word_list": cli.DEFINE_path(
    "word_list",
    None,
    "niah: folder of adjectivelist.txt and nounlist.txt, or wonderwords.",
  ),
  "sentences": flags.DEFINE_string(
    "sentences", None, "niah: sentence splitter, regex or punkt (nltk)."
  ),
  "tasks": flags.DEFINE_list(
    "tasks", None, "harness: names of tasks and groups, or YAML files."
  ),
  "include_path": cli.DEFINE_path(
    "include_path", None, "harness: folder of local tasks."
  ),
  "fewshot": flags.DEFINE_integer(
    "fewshot", None, "harness: number of examples. Default: the task's."
  ),
  "limit": flags.DEFINE_integer(
    "limit", None, "harness: maximum number of documents per task."
  ),
  "rolling": flags.DEFINE_string(
    "rolling",
    None,
    "harness: score documents as one stream or window by window.",
  ),
  "allow_downloads": flags.DEFINE_bool(
    "allow_downloads", None, "harness: download data sets that are not cached."
  ),
}


def main() -> NoReturn:
  """Runs the command line; exits."""
  cli.main(program, usage=__doc__)


def program() -> None:
  """Runs the evaluation that the flags describe."""
  run_task(cli.require("task"))


def run_task(task: str) -> None:
  """Runs `task` with the other flags."""
  from memcomp.evaluation import run

  given = {k: f.value for k, f in _SETTINGS.items() if f.value is not None}
  options = {k: f.value for k, f in _OPTIONS.items() if f.value is not None}
  common = {
    "step": _STEP.value,
    "source": _SOURCE.value,
    "out": _OUT.value,
    "seed": _SEED.value,
    "prompt_file": _PROMPT_FILE.value,
    "rotary_scale": _ROTARY_SCALE.value,
    "contexts": _CONTEXTS.value,
  }
  if task == "compare":
    from memcomp.training import compare

    more = {"stop": _STOP.value, "tensor": _TENSOR.value}
    run.check_flags(task, common | more | given | options)
    compare.run(_CHECKPOINT.value, _OUT.value)
    return
  run.run(
    _CHECKPOINT.value,
    task,
    **common,
    stop_strings=_STOP.value,
    tensor=_TENSOR.value,
    overrides=given,
    options=options,
  )


if __name__ == "__main__":
  main()
