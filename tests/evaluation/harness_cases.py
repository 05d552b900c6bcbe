"""Who runs lm-evaluation-harness, and likelihoods to hold it against."""

import functools
import importlib.util

import jax
import numpy as np
import pytest

from memcomp.evaluation import load

needs_harness = pytest.mark.skipif(
  importlib.util.find_spec("lm_eval") is None, reason="needs the extra eval"
)


@functools.cache
def whole_logits(folder):
  opened = load.open_checkpoint(folder)

  @jax.jit
  def run(ids):
    return opened.model(ids)[0]

  return opened, run


def log_likelihood(folder, context, continuation):
  """Of the whole text at once, without a state; and whether it is greedy."""
  opened, run = whole_logits(folder)
  encode = opened.tokenizer.encode
  ids = encode(context + continuation).astype(np.int32)
  # What stands behind a text cannot reach it.
  padded = np.pad(ids, (0, 512 - len(ids)))[None]
  first = len(encode(context)) - 1
  row = np.asarray(run(padded), np.float64)[first : len(ids) - 1]
  wanted = ids[first + 1 :]
  chosen = row[np.arange(len(wanted)), wanted]
  total = (chosen - np.logaddexp.reduce(row, axis=-1)).sum()
  return total, bool((row.argmax(-1) == wanted).all())
