import dataclasses
import math

import inference_cases as cases
import jax
import numpy as np
import pytest
from flax import nnx

from memcomp import errors
from memcomp.inference import contents, generate
from memcomp.inference import session as session_lib


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


@pytest.mark.slow
def test_horizons_are_those_of_the_decays():
  """The first layer forgets a 32nd a token, the second nothing."""
  config = cases.config("linear_attention+linear_attention", heads=1)
  first = next(iter(config.mixers))
  config.mixers[first] = dataclasses.replace(config.mixers[first], decay="head")
  model = cases.build(config)
  rng = np.random.default_rng(0)
  state = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype),
    session_lib.start(model).state,
  )
  ids = rng.integers(0, 64, (1, contents.PROBE))
  horizons = [
    contents.horizon(*contents.follow(*nnx.split(model), state, ids, depth))
    for depth in (0, 1)
  ]
  assert horizons[0] == pytest.approx(-1 / math.log(1 - 1 / 32), rel=1e-3)
  assert horizons[1] == math.inf
  assert contents.horizon(1.0, 0.0) == 0


@pytest.mark.slow
def test_every_layer_is_measured(model):
  session = cases.read(model, [np.frombuffer(b"one", np.uint8)])
  layers = contents.measure(model, session)
  for index, layer in enumerate(layers):
    memory = session.state.layers[0].mixer.memory
    arrays = [np.asarray(x[index]) for x in memory[:2]]
    norm = np.sqrt(np.mean(np.square(arrays)))
    assert layer.norm == pytest.approx(norm, rel=1e-5)
    assert (layer.mixer, layer.shapes) == ("Trellis", ((2, 8, 8),) * 2)
    assert layer.filled == 1 and layer.most == 8
    assert 1 < layer.directions <= 8
  layers[0] = layers[0]._replace(horizon=31.49, directions=4.0)
  layers[1] = layers[1]._replace(horizon=math.inf)
  table = contents.table(layers).splitlines()
  assert len(table) == 3
  assert table[1].startswith("0      Trellis 2x8x8 + 2x8x8")
  assert table[1].endswith("[#####     ] 4.0 of 8  31 tokens")
  assert table[2].endswith("more than 6,400 tokens")


def test_no_more_directions_than_there_are(monkeypatch):
  """Memories of 4 x 32 and of 32 x 32: 18 on the average, not 4."""
  config = cases.config(
    "trellis", heads=1, key_dim=4, value_dim=32, num_slots=32
  )
  model, rng = cases.build(config), np.random.default_rng(0)
  session = session_lib.start(model)
  session = session._replace(
    position=np.ones(1, np.int32),
    state=jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype(x.dtype), session.state
    ),
  )
  piece = generate.Piece([np.zeros(1, int)], session, np.zeros(1, bool))
  monkeypatch.setattr(generate, "generate", lambda *_, **__: [piece])
  monkeypatch.setattr(contents, "follow", lambda *_: (1.0, 0.5))
  (layer,) = contents.measure(model, session)
  assert sorted(min(shape[-2:]) for shape in layer.shapes) == [4, 32]
  assert layer.most == 18 > layer.directions > 4
  assert f"] {layer.directions:.1f} of 18" in contents.table([layer])


def test_one_text_at_a_time(model):
  with pytest.raises(errors.UserError, match="nothing has been read"):
    contents.measure(model, cases.read(model, [[]]))
  with pytest.raises(errors.UserError, match="split the session"):
    contents.measure(model, cases.read(model, [[], [], []]))
