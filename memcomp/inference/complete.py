"""Continues batches of texts, for evaluations."""

from collections.abc import Sequence

import numpy as np

from memcomp import limits
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import generate, prefill, sample, stop
from memcomp.inference import session as session_lib
from memcomp.models import decoder

WIDTHS = (32, 128, 512)
"""Tokens per row in one prefill call; few, to compile few programs."""

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
    tokenizer: the model's tokenizer.
    texts: at most `rows` texts of ids `[time]`, at least one id each.
    tokens: maximum number of new tokens per text.
    rows: batch size. The last text fills the batch, so that it compiles once.
    settings: sampling settings, one for all texts or one each.
    stop_strings: texts that end an answer, in addition to the tokenizer's end
      tokens; they are not part of the answer.

  Returns:
    The answers, and the state's bytes per row after its text.

  Raises:
    UserError: there are no texts, or more than `rows`, or see `generate`.
  """
  limits.check("number of texts", len(texts))
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
