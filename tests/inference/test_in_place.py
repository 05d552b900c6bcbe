"""Loops over tokens update memories where they lie."""

import dataclasses
import re

import inference_cases as cases
import jax
import numpy as np
import pytest
from flax import nnx

from memcomp.inference import generate, sample
from memcomp.inference import session as session_lib
from memcomp.models import abstract

ROOM = 2048


@pytest.mark.slow
def test_by_layer_is_the_same():
  """In a model of several stacks and repeated parts."""
  config = dataclasses.replace(
    cases.config("trellis+softmax_attention"), num_layers=4
  )
  model = cases.build(config)
  graphdef, params = nnx.split(model)

  @jax.jit
  def step(params, token, state):
    return abstract.merge(graphdef, params).step(token, state)

  stacked = model.init_state(2, 8)
  unstacked = stacked.by_layer()
  assert [len(stack.layers) for stack in unstacked.layers] == [2, 2]
  for token in np.arange(8).reshape(4, 2):
    expected, stacked = step(params, token, stacked)
    logits, unstacked = step(params, token, unstacked)
    np.testing.assert_allclose(logits, expected, atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    unstacked.stacked(),
    stacked,
  )


def test_rows_are_written_in_place():
  """Those of full attention, in the loop that makes tokens."""
  config = cases.config("softmax_attention")
  model = cases.build(dataclasses.replace(config, num_layers=2))
  session = session_lib.start(model, tokens=ROOM)
  graphdef, params = nnx.split(model)
  zero = np.zeros(1, np.int32)
  text = (
    generate.make_tokens.lower(
      graphdef,
      8,
      params,
      session,
      zero,
      zero + 8,
      sample.knobs(cases.GREEDY, 1),
      64,
      None,
    )
    .compile()
    .as_text()
  )
  rows = rf"f32\[[0-9,]*{ROOM},8\]\S*"
  # A layer's keys and values, each once.
  assert len(re.findall(rf"{rows} dynamic-update-slice\(", text)) == 4
  assert not re.findall(rf"{rows} copy\(", text)
