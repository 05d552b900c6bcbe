"""The parts of `run`: each measures one thing and returns it for JSON."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from memcomp import config as config_lib
from memcomp import errors, limits, paths
from memcomp import progress as progress_lib
from memcomp.data import sources
from memcomp.data import store as store_lib
from memcomp.evaluation import (
  byte_models,
  load,
  perplexity,
  report,
  text,
  throughput,
)
from memcomp.inference import chat, generate, sample, saved, terminal

MAX_COUNTED_BYTES = 1 << 28
"""Maximum training text for byte models; sorting its codes takes about 40 times
as much memory."""


def check(settings: config_lib.EvaluationConfig) -> None:
  """Raises UserError naming the setting that is out of range."""
  limits.check("lengths", settings.lengths)
  limits.check("rows", settings.rows, 1, limits.SIDE_BY_SIDE)
  limits.check("sample_tokens", settings.sample_tokens, 0)
  _draws(settings, 0)


def open_text(checkpoint: load.Checkpoint, source: str) -> store_lib.TokenStore:
  """Opens the text to evaluate on; "" is the run's validation split.

  Raises:
    UserError: there is no text, or nothing to predict in it, or a source has
      weights.
  """
  data, tokenizer = checkpoint.config.data, checkpoint.tokenizer
  if sources.is_mixture(source):
    raise errors.UserError(
      f"--source={source}: every text is scored once, whole, so weights mean"
      " nothing; give paths separated by commas"
    )
  if source:
    format = sources.format_of(data, tokenizer)
    store = sources.open_source(
      source, tokenizer, format=format, field="--source"
    )
  else:
    store = sources.open_text(data, "validation", tokenizer=tokenizer)
  if store.num_tokens < 2:
    raise errors.UserError(
      f"{store.name}: nothing to score, for it is one token, and the first is"
      " not predicted; give more text"
    )
  if not any(
    tokenizer.bytes_of(store.read(i, 0, int(length))).any()
    for i, length in enumerate(store.lengths)
  ):
    raise errors.UserError(
      f"{store.name}: nothing to score, for its tokens stand for no bytes; give"
      " some text"
    )
  return store


def measure(
  checkpoint: load.Checkpoint,
  store: store_lib.TokenStore,
  settings: config_lib.EvaluationConfig,
) -> dict[str, Any]:
  """Scores a text: completely at the trained length, and far beyond in spans.

  Returns:
    `text` (its description), `task_hash`, `trained_length`
    (`perplexity.whole_text`) and, except for conversations, `streamed`
    (`perplexity.streamed`).
  """
  tokenizer = checkpoint.tokenizer
  score = perplexity.make_score(checkpoint.model)
  stream = text.Stream(store)
  about = report.describe_text(store, text.num_bytes(store, tokenizer))
  task = {
    "window": checkpoint.config.data.sequence_length,
    "lengths": settings.lengths,
    "rows": settings.rows,
  }
  whole = perplexity.whole_text(score, stream, tokenizer, task["window"])
  found = {
    "text": about,
    "task_hash": report.task_hash(
      **task, text=store.fingerprint, tokenizer=tokenizer.fingerprint
    ),
    "trained_length": whole,
  }
  if store.scored is None:
    found["streamed"] = perplexity.streamed(score, stream, tokenizer, **task)
  return found


def compare(
  checkpoint: load.Checkpoint, validation: store_lib.TokenStore
) -> list[dict[str, Any]]:
  """Fits byte models on the run's training text; scores the validation text.

  Returns:
    `name` and `bits_per_byte` of each; only the uniform distribution if there
    is too much training text.
  """
  rows = [{"name": "uniform", "bits_per_byte": byte_models.UNIFORM_BITS}]
  data, tokenizer = checkpoint.config.data, checkpoint.tokenizer
  store = sources.open_text(data, "train", tokenizer=tokenizer)
  size = store.num_tokens  # about the least that its bytes can be
  if size <= MAX_COUNTED_BYTES:
    size = text.num_bytes(store, tokenizer)
  if size > MAX_COUNTED_BYTES:
    print(
      f"byte models left out: the training text has {size:,} bytes or more, and"
      f" they are meant for {MAX_COUNTED_BYTES:,}"
    )
    return rows
  target, known = (text.as_bytes(s, tokenizer) for s in (validation, store))
  if target is None or known is None:
    print(
      "byte models left out: the tokenizer does not keep the whole text, so"
      " they would be scored on another"
    )
    return rows
  progress = progress_lib.Progress(
    "fitting byte models", byte_models.MAX_ORDER + 1
  )
  bits = byte_models.bits_per_byte(known, target, progress=progress.advance)
  best = min(bits, key=bits.__getitem__)
  of = f"best of 0 to {byte_models.MAX_ORDER}"
  rows.append({"name": "order-2 byte model", "bits_per_byte": bits[2]})
  rows.append(
    {"name": f"order-{best} byte model ({of})", "bits_per_byte": bits[best]}
  )
  for name, size in byte_models.compressed_bits_per_byte(
    target.tobytes()
  ).items():
    rows.append({"name": name, "bits_per_byte": size})
  return rows


def show_sample(
  checkpoint: load.Checkpoint,
  settings: config_lib.EvaluationConfig,
  seed: int,
  stop_strings: Sequence[str] = (),
) -> dict[str, Any]:
  """Prints a prompt and its continuation as it is made; returns both."""
  draws = _draws(settings, seed)
  pieces = generate.text(
    checkpoint.model,
    checkpoint.tokenizer,
    settings.prompt,
    tokens=settings.sample_tokens,
    settings=draws,
    stop_strings=stop_strings,
  )
  made = []
  for number, piece in enumerate(pieces):
    # Wait for the first piece, so that an empty prompt prints nothing.
    terminal.show(piece if number else settings.prompt + piece)
    made.append(piece)
  terminal.show("\n" if made else f"{settings.prompt}\n")
  return {
    "prompt": settings.prompt,
    "text": "".join(made),
    "tokens": settings.sample_tokens,
    **dataclasses.asdict(draws),
  }


def talk(
  checkpoint: load.Checkpoint,
  settings: config_lib.EvaluationConfig,
  seed: int,
  stop_strings: Sequence[str] = (),
  opening: str = "",
) -> None:
  """Runs `inference.chat` in the terminal; it reads `opening` first.

  A model that was trained on conversations takes it as the system's message.
  """
  owner = saved.Owner(
    checkpoint.model, checkpoint.config.model, checkpoint.tokenizer
  )
  conversation = chat.Chat(
    owner,
    tokens=settings.sample_tokens,
    settings=_draws(settings, seed),
    stop_strings=stop_strings,
    template=checkpoint.template(),
  )
  print(report.model_label(checkpoint, step=True))
  conversation.run(opening)


def contexts(given: Sequence[int | str]) -> list[int]:
  """Parses the contexts to time; by default those of `throughput`.

  Raises:
    UserError: one is not a whole number of 1 or more.
  """
  chosen = limits.whole_numbers("--contexts", given, 1, limits.CONTEXT)
  return chosen or list(throughput.CONTEXTS)


def read_prompt(path: str) -> str:
  """Returns the text of a file.

  Raises:
    UserError: it cannot be read, is empty or not UTF-8.
  """
  with paths.reading_text(f"prompt {path}"):
    prompt = pathlib.Path(path).read_bytes().decode()  # with its line breaks
  if not prompt:
    raise errors.UserError(
      f"prompt {path} is empty; give some text to continue"
    )
  return prompt


def _draws(settings: config_lib.EvaluationConfig, seed: int) -> sample.Settings:
  names = [field.name for field in dataclasses.fields(sample.Settings)]
  given = {n: getattr(settings, n) for n in names if n != "seed"}
  return sample.Settings(**given, seed=seed)
