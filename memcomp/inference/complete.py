"""Continues many texts side by side, for evaluations."""

from collections.abc import Sequence

import numpy as np

from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import generate, prefill, sample, stop
from memcomp.inference import session as session_lib
from memcomp.models import decoder

WIDTHS = (32, 128, 512)
"""Tokens of a row that one call reads: few, so that few programs are made."""

GREEDY = sample.Settings(temperature=0.0)


def complete(
  model: decoder.Decoder,
  tokenizer: tokenizer_lib.Tokenizer,
  texts: list[np.ndarray],
  *,
  tokens: int,
  rows: int,
  settings: sample.Settings | list[sample.Settings] = GREEDY,
  stop_strings: Sequence[str] = (),
) -> tuple[list[str], int]:
  """Continues one batch of texts.

  Args:
    model: the language model.
    tokenizer: its own.
    texts: ids `[time]`, at least one each; at most `rows`.
    tokens: to make for each, at most.
    rows: of the batch: the last text fills it, so that it compiles once.
    settings: how tokens are drawn, one for all or one for each text.
    stop_strings: what ends an answer, beside the tokenizer's ends of a text,
      and is no part of it.

  Returns:
    The answers, and bytes of the state of one row behind its text.
  """
  spare = rows - len(texts)
  ids = [*texts, *texts[-1:] * spare]
  if not isinstance(settings, sample.Settings):
    settings = [*settings, *settings[-1:] * spare]
  stops = stop.make(stop_strings, tokenizer)
  longest = max(len(text) for text in ids)
  session = session_lib.start(model, rows, longest + tokens)
  session = prefill.read(model, session, ids, widths=WIDTHS)
  size = session_lib.num_bytes(session) // rows
  made: list[list[int]] = [[] for _ in ids]
  for piece in generate.generate(
    model,
    session,
    tokens=tokens,
    settings=settings,
    stops=stops,
    vocab_size=tokenizer.vocab_size,
  ):
    for row, new in zip(made, piece.ids, strict=True):
      row.extend(new.tolist())
  answers = []
  for row in made[: len(texts)]:
    text = stop.Text(tokenizer, stops)
    answers.append("".join(map(text.push, row)) + text.finish())
  return answers, size
