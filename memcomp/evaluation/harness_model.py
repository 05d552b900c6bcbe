"""A checkpoint as a model of lm-evaluation-harness; needs the extra `eval`.

import lm_eval
from memcomp.evaluation import harness_model, load

model = harness_model.Model(load.open_checkpoint("runs/quickstart"))
lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])
"""

import contextlib
import itertools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api import model as model_lib
from lm_eval.models import utils as models_utils

from memcomp import errors
from memcomp import progress as progress_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import likelihood, load
from memcomp.inference import complete, sample


class Model(model_lib.TemplateLM):
  """Answers the harness's requests.

  Attributes:
    longest: greatest number of tokens before the last one of a request's text
      so far; an answer counts with its greatest length.
    beyond: number of requests where these are more than in training.
  """

  def __init__(
    self,
    opened: load.Checkpoint,
    *,
    rows: int = 8,
    rolling: str = "stream",
    seed: int = 0,
  ):
    """Wraps a checkpoint.

    Args:
      opened: the checkpoint.
      rows: number of parallel texts.
      rolling: how to score documents. "stream" reads each from start to end;
        "window" reads windows of the trained length with fresh states.
      seed: seed of sampling, for tasks that sample.
    """
    super().__init__()
    self._opened = opened
    self._rows = rows
    self._rolling = rolling
    self._seed = seed
    self._window = opened.config.data.sequence_length
    self._prefix = _prefix(opened.tokenizer)
    self.longest = self.beyond = 0
    self._unused: set[str] = set()

  @property
  def eot_token_id(self) -> int:
    """The id that ends documents, or a substitute; stands for ""."""
    return self._prefix

  @property
  def tokenizer_name(self) -> str:
    """Identifies the tokenizer."""
    return self._opened.tokenizer.fingerprint

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **unused: Any
  ) -> list[int]:
    """Returns ids; none of these tokenizers adds special ones."""
    return self._opened.tokenizer.encode(string).tolist()

  def loglikelihood(
    self, requests: list[Any], disable_tqdm: bool = True
  ) -> list[tuple[float, bool]]:
    """See `LM`; the scoring shows its own progress.

    The whole continuation is scored, even without a context. The harness would
    treat a first token equal to `prefix_token_id`, which may be a line break
    here, as the context.
    """
    encoded = []
    for request in requests:
      context, continuation = request.args
      before, after = [], self.tok_encode(continuation)
      if context:
        before, after = self._encode_pair(context, continuation)
      encoded.append(((context, continuation), before, after))
    return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

  def _loglikelihood_tokens(
    self,
    requests: list[tuple[tuple[str, str], list[int], list[int]]],
    disable_tqdm: bool = False,
    **unused: Any,
  ) -> list[tuple[float, bool]]:
    asked = [
      self._request(context, continuation)
      for _, context, continuation in requests
    ]
    answers: list[Any] = [None] * len(requests)
    for one in self._scored(asked):
      answers[one.index] = one.log_likelihood, one.greedy
      self.cache_hook.add_partial(
        "loglikelihood", requests[one.index][0], answers[one.index]
      )
    return answers

  def loglikelihood_rolling(
    self, requests: list[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """See `LM`; the first token follows `prefix_token_id`."""
    asked, of = [], []
    for index, request in enumerate(requests):
      for context, continuation in self._cut(request.args[0]):
        asked.append(self._request(context, continuation))
        of.append(index)
    sums = [0.0] * len(requests)
    left = np.bincount(np.array(of, int), minlength=len(requests))
    for one in self._scored(asked):
      index = of[one.index]
      sums[index] += one.log_likelihood
      left[index] -= 1
      if not left[index]:
        self.cache_hook.add_partial(
          "loglikelihood_rolling", requests[index].args, sums[index]
        )
    return sums

  def generate_until(
    self, requests: list[Any], disable_tqdm: bool = False
  ) -> list[str]:
    """See `LM`; contexts are never truncated."""
    groups: dict[str, list[int]] = {}
    texts = []
    for index, request in enumerate(requests):
      context, given = request.args
      text = self._request(self.tok_encode(context), []).context
      texts.append(text)
      settings = models_utils.normalize_gen_kwargs(given)
      groups.setdefault(json.dumps(settings, sort_keys=True), []).append(index)
    answers = [""] * len(requests)
    progress = progress_lib.Progress("answering, requests", len(requests))
    for key, indices in groups.items():
      settings = json.loads(key)
      self._name_unused(settings)
      stops = [string for string in settings["until"] if string]
      # Batch texts of similar lengths.
      indices.sort(key=lambda i: len(texts[i]), reverse=True)
      for batch in itertools.batched(indices, self._rows):
        self._note(len(texts[i]) + settings["max_gen_toks"] for i in batch)
        found, _ = complete.complete(
          self._opened.model,
          self._opened.tokenizer,
          [texts[i] for i in batch],
          tokens=settings["max_gen_toks"],
          rows=self._rows,
          settings=[self._draws(settings, i) for i in batch],
          stop_strings=stops,
        )
        for index, answer in zip(batch, found, strict=True):
          answers[index] = answer
          self.cache_hook.add_partial(
            "generate_until", requests[index].args, answer
          )
        progress.advance(len(batch))
    return answers

  def _request(
    self, context: list[int], continuation: list[int]
  ) -> likelihood.Request:
    return likelihood.Request(
      np.array(context or [self.prefix_token_id], np.int32),
      np.array(continuation, np.int32),
    )

  def _cut(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
    """Splits a document into contexts and continuations."""
    ids = self.tok_encode(text)
    if self._rolling == "stream":
      return [([self.prefix_token_id], ids)]
    windows = utils.get_rolling_token_windows(
      ids,
      prefix_token=self.prefix_token_id,
      max_seq_len=self._window,
      context_len=1,
    )
    return map(utils.make_disjoint_window, windows)

  def _scored(self, asked: list[likelihood.Request]):
    self._note(len(one.context) + len(one.continuation) for one in asked)
    progress = progress_lib.Progress("scoring, requests", len(asked))
    for one in likelihood.score(self._opened.model, asked, rows=self._rows):
      yield one
      progress.advance()

  def _note(self, lengths: Iterable[int]) -> None:
    for length in lengths:
      read = length - 1
      self.longest = max(self.longest, read)
      self.beyond += read > self._window

  def _name_unused(self, settings: dict[str, Any]) -> None:
    unused = settings.keys() - _KNOWN - self._unused
    if settings.get("num_beams") == 1:  # as here
      unused.discard("num_beams")
    for name in sorted(unused):
      print(f"note: the generation setting {name} of a task has no effect here")
    self._unused |= unused

  def _draws(self, settings: dict[str, Any], index: int) -> sample.Settings:
    """Returns a task's settings for a request; None stands for a default."""
    names = _DRAWS if settings["do_sample"] else _DRAWS[:1]
    given = {
      name: settings[name] for name in names if settings.get(name) is not None
    }
    if not settings["do_sample"]:
      given["temperature"] = 0.0
    # Repeated requests must get different samples.
    given["seed"] = (self._seed + index) % 2**32
    try:
      return sample.Settings(**given)
    except errors.UserError as error:
      raise errors.UserError(f"the generation of a task: {error}") from error


_DRAWS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
_KNOWN = {*_DRAWS, "do_sample", "until", "max_gen_toks"}


def _prefix(tokenizer: tokenizer_lib.Tokenizer) -> int:
  """Returns the token before a text: its end, a line break, a space, or any."""
  tokenizer.encode("")  # raises if ids stand for no text
  found = list(tokenizer.ends[:1])
  for text in ("\n", " "):
    with contextlib.suppress(errors.UserError):  # the tokenizer may lack them
      found += tokenizer.encode(text)[-1:].tolist()
  return found[0] if found else 0
