"""What holds for every mixer: batches, growth; and a mesh of 8 devices."""

import inference_cases as cases
import jax
import numpy as np
import pytest
import rotation

from memcomp import sharding
from memcomp.config import MeshConfig
from memcomp.inference import session as session_lib
from memcomp.layers import registry
from memcomp_kernels.testing import errors

HYBRID = "linear_attention+softmax_attention"
GROWING = ("key_value_means", "softmax_attention", HYBRID)
SHORT, LONG = (np.random.default_rng(n).integers(0, 64, n) for n in (3, 14))
MADE = 4


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
  """So that memories grow: before generating, and between two pieces."""
  monkeypatch.setattr(session_lib, "LEAST_ROOM", 16)


# Of the others tests/models has what this rests on: padding on the left.
@pytest.fixture(
  scope="module",
  params=[HYBRID, *registry.MIXERS],
)
def name(request):
  return request.param


@pytest.fixture(scope="module")
def model(name):
  return cases.build(cases.config(name))


def run(model, *prompts):
  """Logits after prompts, ids that follow, and the session after them."""
  # Whatever the lengths, pieces are of 8 and begin with padding: every call
  # here runs the same two programs.
  session = cases.read(model, prompts, 8)
  (piece,) = cases.pieces(model, session, MADE)
  return session.logits, np.stack(piece.ids), piece.session


@pytest.mark.slow
def test_rows_of_any_length_equal_each_alone(model):
  logits, ids, after = run(model, SHORT, LONG)
  for row, prompt in enumerate((SHORT, LONG)):
    alone = run(model, prompt, prompt)
    errors.assert_close(logits[row], alone[0][0], 1e-5)
    np.testing.assert_array_equal(ids[row], alone[1][0])
    of_row, of_alone = (
      session_lib.grow(model, session_lib.split(session)[place], 32)
      for session, place in ((after, row), (alone[2], 0))
    )
    errors.assert_close(of_row, of_alone, 1e-5)
  # And what was made, read as a prompt, leads to the same logits.
  texts = [np.concatenate(x) for x in zip((SHORT, LONG), ids, strict=True)]
  errors.assert_close(after.logits, cases.read(model, texts, 8).logits, 1e-5)


@pytest.mark.slow
def test_room_given_later_equals_room_from_the_start(model, name, monkeypatch):
  small = session_lib.start(model, 2)
  grown = session_lib.grow(model, small, 32)
  grows = any(
    a.shape != b.shape
    for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(grown), strict=True)
  )
  assert grows == (name in GROWING)
  if not grows:
    return
  later = run(model, SHORT, LONG)
  monkeypatch.setattr(session_lib, "LEAST_ROOM", 32)
  at_once = run(model, SHORT, LONG)
  np.testing.assert_array_equal(later[1], at_once[1])
  errors.assert_close(later[0], at_once[0], 1e-5)
  errors.assert_close(session_lib.grow(model, later[2], 32), at_once[2], 1e-5)
  # Sessions with other room go on together.
  texts = session_lib.join(
    [session_lib.split(later[2])[0], session_lib.split(at_once[2])[1]]
  )
  errors.assert_close(texts, at_once[2], 1e-5)


@pytest.mark.parametrize("name", ["key_value_means", "softmax_attention"])
def test_new_room_is_as_if_it_had_been_there(name, monkeypatch):
  model = cases.build(cases.config(name))
  grown = session_lib.grow(model, session_lib.start(model), 64)
  monkeypatch.setattr(session_lib, "LEAST_ROOM", 64)
  errors.assert_equal(grown, session_lib.start(model), "before any token")


@pytest.mark.parametrize(
  ("names", "devices"),
  rotation.cases(
    [("softmax_attention", 2), (HYBRID, 8), ("trellis+key_value_means", 8)],
    [("softmax_attention", 2)],
  ),
)
def test_several_devices_equal_one(names, devices, monkeypatch):
  monkeypatch.setattr(session_lib, "LEAST_ROOM", 32)
  config = cases.config(names)
  mesh = sharding.make_mesh(MeshConfig(tensor=devices))
  prompts = SHORT, LONG[:7]
  found = run(cases.build(config, mesh), *prompts)
  expected = run(cases.build(config), *prompts)
  np.testing.assert_array_equal(found[1], expected[1])
  errors.assert_close(found[0], expected[0], 1e-5)
  errors.assert_close(found[2], expected[2], 1e-5)
  keys = found[2].state.layers[-1].mixer.memory.keys
  assert len(keys.sharding.device_set) == devices
  assert not keys.sharding.is_fully_replicated
