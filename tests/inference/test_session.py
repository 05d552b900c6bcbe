import dataclasses
import json
import subprocess
import sys

import inference_cases as cases
import jax
import numpy as np
import pytest
from flax import nnx

from memcomp import errors, integrity
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import prefill, sample, saved
from memcomp.inference import session as session_lib

BYTES = tokenizer_lib.ByteTokenizer()
# Of the lengths that leave no new program to compile.
SHORT, LONG = (
  BYTES.encode("one"),
  BYTES.encode("another text, which has 32 bytes"),
)
WARM = sample.Settings(temperature=1.0, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def owner(model, config):
  return saved.Owner(model, config, BYTES)


@pytest.fixture(scope="module")
def session(model):
  """Of two texts that have been continued."""
  read = cases.read(model, [SHORT, LONG, SHORT])
  return cases.pieces(model, read, 12, WARM)[-1].session


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_split_and_join_undo_each_other(session):
  rows = session_lib.split(session)
  assert [row.position.tolist() for row in rows] == [[15], [44], [15]]
  assert_equal(session_lib.join(rows), session)
  assert_equal(
    session_lib.join(rows[::-1]).position, np.array([15, 44, 15])[::-1]
  )


def test_rows_are_picked(session):
  second, first = session_lib.split(session)[1::-1]
  picked = session_lib.pick(session, np.array([1, 0]))
  assert_equal(picked, session_lib.join([second, first]))
  assert_equal(jax.jit(session_lib.pick)(session, np.array([1, 0])), picked)
  for row in (3, -4):
    with pytest.raises(errors.UserError, match=f"row={row}: give "):
      session_lib.pick(session, np.array([0, row]))
  with pytest.raises(errors.UserError, match="number of sessions=0: give 1"):
    session_lib.join([])


def test_forks_go_their_own_ways(model, session):
  text = session_lib.split(session)[1]
  forks = session_lib.fork(text, 3)
  before = jax.tree.map(np.array, text)
  seeds = [dataclasses.replace(WARM, seed=seed) for seed in (3, 4, 3)]
  pieces = cases.pieces(model, forks, 16, seeds)
  first, other, same = cases.joined(pieces)
  assert first == same != other
  assert_equal(text, before)
  # As the text alone.
  assert cases.joined(cases.pieces(model, text, 16, WARM)) == [first]
  both = session_lib.fork(session, 2).position
  assert both.tolist() == [15, 15, 44, 44, 15, 15]
  with pytest.raises(errors.UserError, match="copies=0"):
    session_lib.fork(session, 0)


def test_bytes_are_of_the_memories_and_what_belongs_to_them(session):
  floats = 2 * 2 * 8 * (8 + 8)  # layers, heads, slots, key and value
  rows = session_lib.num_bytes(session_lib.split(session)[0])
  # Trellis keeps the memory at the start of its chunk, too; and taps.
  assert 2 * 4 * floats < rows < 3 * 4 * floats
  assert session_lib.num_bytes(session) == 3 * rows


def test_a_saved_session_comes_back_bit_by_bit(tmp_path, session, owner):
  folder = tmp_path / "a" / "talk"
  size = saved.save(folder, session, owner)
  assert size < 100_000
  assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["talk"]
  assert_equal(saved.load(folder, owner), session)
  meta = json.loads((folder / "session.json").read_text())
  assert meta["tokens"] == [15, 44, 15]
  assert meta["tokenizer"] == BYTES.fingerprint
  with pytest.raises(errors.UserError, match="is there already"):
    saved.save(folder, session, owner)


CONTINUE = """
import sys
sys.path[:0] = {path!r}
import inference_cases as cases, numpy as np, test_session as here
from memcomp.inference import prefill, saved, session as session_lib
config = cases.small_config()
owner = saved.Owner(cases.build(config), config, here.BYTES)
session = saved.load({folder!r}, owner)
session, ids = here.go_on(owner.model, session)
np.save({out!r}, ids)
saved.save({folder!r} + "-after", session, owner)
"""


def go_on(model, session):
  """A turn of a conversation: reads on, and answers."""
  session = prefill.read(model, session, [SHORT, LONG, SHORT], piece_tokens=16)
  pieces = cases.pieces(model, session, 20, WARM)
  return pieces[-1].session, np.stack(cases.joined(pieces))


def test_a_conversation_goes_on_after_a_restart(tmp_path, session, owner):
  """In another process: the same ids, and the same bits of state."""
  folder, out = str(tmp_path / "talk"), str(tmp_path / "ids.npy")
  saved.save(folder, session, owner)
  program = CONTINUE.format(path=sys.path, folder=folder, out=out)
  subprocess.run([sys.executable, "-c", program], check=True)
  expected, ids = go_on(owner.model, session)
  np.testing.assert_array_equal(np.load(out), ids)
  assert_equal(saved.load(folder + "-after", owner), expected)


def test_grown_memories_are_saved_as_they_are(tmp_path):
  config = cases.config("softmax_attention")
  model = cases.build(config)
  owner = saved.Owner(model, config, BYTES)
  session = session_lib.grow(model, session_lib.start(model), 2000)
  saved.save(tmp_path / "talk", session, owner)
  found = saved.load(tmp_path / "talk", owner)
  assert found.state.layers[0].mixer.memory.keys.shape[3] == 2048
  assert_equal(found, session)


def test_a_session_of_another_model_is_refused(tmp_path, session, owner):
  folder = tmp_path / "talk"
  saved.save(folder, session, owner)
  trained = with_other_parameters(owner.model)
  slots = dataclasses.replace(owner.config.mixers["memory"], num_slots=16)
  changed = {
    "its parameters are others": owner._replace(model=trained),
    "mixers.memory.num_slots was 8, is 16": owner._replace(
      config=dataclasses.replace(owner.config, mixers={"memory": slots})
    ),
    "its tokenizer is another": owner._replace(tokenizer=Other()),
  }
  for message, other in changed.items():
    with pytest.raises(errors.UserError, match=message):
      saved.load(folder, other)
  # How it was trained is not what it is.
  remat = dataclasses.replace(owner.config, remat="block")
  assert_equal(saved.load(folder, owner._replace(config=remat)), session)


@pytest.mark.parametrize(
  "fields", [("solver",), ("dtype", "norm_eps", "heads")]
)
def test_a_session_from_before_a_field_existed(
  fields, tmp_path, session, owner
):
  """As a run's config: what it has not was at its default."""
  folder = tmp_path / "talk"
  saved.save(folder, session, owner)
  path = folder / "session.json"
  meta = json.loads(path.read_text())
  name, mixer = next(iter(meta["model"]["mixers"].items()))
  for field in fields:
    (mixer if field in mixer else meta["model"]).pop(field)
  meta["model"].pop("remat")  # which none of them had
  path.write_text(json.dumps(meta))
  integrity.write(folder)
  if "heads" not in fields:
    assert_equal(saved.load(folder, owner), session)
    return
  # Not at its default, and so of another model.
  with pytest.raises(
    errors.UserError, match=rf"model\.mixers\.{name}\.heads was \d+, is 2"
  ):
    saved.load(folder, owner)


def test_a_session_whose_memories_had_other_arrays(tmp_path, session, owner):
  folder = tmp_path / "talk"
  saved.save(folder, session, owner)
  path = folder / "session.json"
  meta = json.loads(path.read_text())
  meta["arrays"].popitem()
  path.write_text(json.dumps(meta))
  integrity.write(folder)
  with pytest.raises(errors.UserError, match="written by another version"):
    saved.load(folder, owner)


class Other(tokenizer_lib.ByteTokenizer):
  def __init__(self):
    super().__init__()
    self.fingerprint = "0" * 16


def with_other_parameters(model):
  graphdef, params = nnx.split(model)
  scale = params["norm"]["scale"]
  params["norm"]["scale"] = scale.replace(scale[...].at[0].add(1e-7))
  return nnx.merge(graphdef, params)


def test_damage_is_found(tmp_path, session, owner):
  folder = tmp_path / "talk"
  saved.save(folder, session, owner)
  (largest,) = sorted(
    (p for p in folder.rglob("d/*")), key=lambda p: p.stat().st_size
  )[-1:]
  data = bytearray(largest.read_bytes())
  data[-1] ^= 1
  largest.write_bytes(data)
  with pytest.raises(errors.UserError, match="is damaged"):
    saved.load(folder, owner)
  # Nor is it taken for a fault of the program where the checksums are lost.
  (folder / "sha256.json").unlink()
  (folder / "arrays/_METADATA").write_text("{}")
  with pytest.raises(errors.UserError, match="is damaged"):
    saved.load(folder, owner)
  with pytest.raises(errors.UserError, match="is no saved session"):
    saved.load(tmp_path / "nothing", owner)


def test_a_failed_save_leaves_nothing(tmp_path, session, owner, monkeypatch):
  def full(*unused):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(saved.integrity, "write", full)
  with pytest.raises(errors.UserError, match="cannot write"):
    saved.save(tmp_path / "talk", session, owner)
  assert not list(tmp_path.iterdir())
