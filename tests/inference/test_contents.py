import dataclasses
import math

import inference_cases as cases
import numpy as np
import pytest

from memcomp import errors
from memcomp.inference import contents


def test_directions():
  rng = np.random.default_rng(0)
  rotation = np.linalg.qr(rng.normal(size=(6, 6)))[0]
  one = np.outer(rng.normal(size=6), rng.normal(size=4))
  assert contents.directions(np.zeros((2, 6, 4))) == 0
  assert contents.directions(one) == pytest.approx(1)
  assert contents.directions(3 * rotation) == pytest.approx(6)
  # Three quarters of the squares in one direction, a quarter in another.
  two = rotation @ np.diag([3**0.5, 1, 0, 0, 0, 0])
  expected = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
  assert contents.directions(two) == pytest.approx(expected)
  assert contents.directions(np.stack([one @ one.T, 3 * rotation])) == (
    pytest.approx(3.5)
  )


@pytest.fixture(scope="module")
def forgetful():
  """Two layers: the first forgets a 32nd a token, the second nothing."""
  config = cases.config("linear_attention+linear_attention", heads=1)
  first = dataclasses.replace(config.mixer, decay="head")
  return cases.build(dataclasses.replace(config, mixer=first))


def test_horizons_are_those_of_the_decays(forgetful):
  prompt = np.random.default_rng(0).integers(0, 64, 40)
  session = cases.read(forgetful, [prompt], 64)
  first, second = contents.measure(forgetful, session)
  assert first.horizon == pytest.approx(-1 / math.log(1 - 1 / 32), rel=1e-3)
  assert second.horizon == math.inf
  memory = np.asarray(session.state.layers[0].mixer.memory)
  assert first.norm == pytest.approx(np.sqrt(np.mean(memory**2)), rel=1e-5)
  assert (first.mixer, first.shapes) == ("LinearAttention", ((1, 8, 8),))
  assert first.filled == 1 and first.most == 8
  assert 1 < first.directions <= 8

  table = contents.table([first, second]).splitlines()
  assert len(table) == 3
  assert table[1].startswith("0      LinearAttention 1x8x8")
  assert table[1].endswith("31 tokens")
  assert table[2].endswith("more than 6,400 tokens")


def test_one_text_at_a_time(forgetful):
  with pytest.raises(errors.UserError, match="nothing has been read"):
    contents.measure(forgetful, cases.read(forgetful, [[]]))
  with pytest.raises(errors.UserError, match="split the session"):
    contents.measure(forgetful, cases.read(forgetful, [[], []]))
