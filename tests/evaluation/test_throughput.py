"""Throughput: what is timed is what it says."""

import jax
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp import errors
from memcomp.evaluation import throughput
from memcomp.inference import session as session_lib
from memcomp.layers import delta_net, softmax_attention
from memcomp.models import decoder

MIXERS = {
  "constant": delta_net.DeltaNetConfig(heads=1, key_dim=4, value_dim=4),
  "growing": softmax_attention.SoftmaxAttentionConfig(
    heads=1, key_dim=4, value_dim=4, rotary_dim=4, max_length=2048
  ),
}


def model(name):
  config = decoder.DecoderConfig(
    vocab_size=11,
    d_model=4,
    num_layers=1,
    mlp_dim=4,
    mixers={"memory": MIXERS[name]},
  )
  return decoder.Decoder(config, rngs=nnx.Rngs(0))


def by_tokens(function, tokens=0):
  """A clock: half a second for a call, a quarter for a token."""
  function(*[tokens] * (tokens > 0))
  return 0.5 + 0.25 * tokens


@pytest.mark.slow
def test_tokens_alone_are_timed_and_the_memory_that_they_read(monkeypatch):
  """256 tokens fill the first room; more room is made before the clock."""
  monkeypatch.setattr(throughput, "_seconds", by_tokens)
  generate, bytes_ = throughput.generate.generate, []

  def noting(model, session, **given):
    before = session_lib.num_bytes(session)
    for piece in generate(model, session, **given):
      bytes_.append((before, session_lib.num_bytes(piece.session)))
      yield piece

  monkeypatch.setattr(throughput.generate, "generate", noting)
  tiny = model("growing")
  (row,) = throughput.measure(tiny, contexts=[256], tokens=3, rounds=2)
  assert (row["seconds_per_token"], row["seconds_per_call"]) == (0.25, 0.5)
  assert row["seconds_per_token_fastest"] == 0.25
  assert set(bytes_) == {(row["state_bytes"], row["state_bytes"])}


def test_a_token_never_takes_less_than_nothing(monkeypatch):
  """Where the clock is noisier than tokens are long."""
  seconds = iter([9.0, 5.0, 4.0, 9.0, 6.0, 4.5])  # read, one, all of two rounds
  monkeypatch.setattr(throughput, "_seconds", lambda *_: next(seconds))
  (row,) = throughput.measure(
    model("constant"), contexts=[2], tokens=4, rounds=2
  )
  assert row["seconds_per_token"] == row["seconds_per_token_fastest"] == 1.0
  monkeypatch.setattr(throughput, "_seconds", by_tokens)
  (row,) = throughput.measure(
    model("constant"), contexts=[2], tokens=4, rounds=2
  )
  assert (row["seconds_per_token"], row["seconds_per_call"]) == (0.25, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", rotation.cases(MIXERS, ["growing"]))
def test_rows_by_context(name, monkeypatch):
  """Positions are the contexts', and bytes those of a state made for them."""
  positions, turns = [], []
  read, make = throughput._Turn.read, throughput._Turn.make
  # So short a timing would be noise.
  monkeypatch.setattr(throughput, "_seconds", by_tokens)

  def reading(turn):
    after = read(turn)
    positions.append((int(after.position[0]), turn.num_tokens))
    return after

  def making(turn, session, tokens):
    turns.append((int(session.position[1]), tokens))
    return make(turn, session, tokens)

  monkeypatch.setattr(throughput._Turn, "read", reading)
  monkeypatch.setattr(throughput._Turn, "make", making)
  tiny = model(name)
  done = []
  rows = throughput.measure(
    tiny,
    contexts=[600, 20],
    batch=2,
    tokens=3,
    rounds=2,
    progress=lambda: done.append(1),
  )
  assert positions == [(20, 40), (600, 1160)] * 3
  first = [(20, 3), (600, 3)]
  assert turns == first + [(20, 1), (20, 3), (600, 1), (600, 3)] * 2
  assert len(done) == 6
  assert [row["context"] for row in rows] == [20, 600]
  for row, context in zip(rows, (20, 600), strict=True):
    fresh = session_lib.grow(tiny, session_lib.start(tiny), context + 3)
    assert row["state_bytes"] == session_lib.num_bytes(fresh)
    assert row["peak_bytes"] > 0
    for key in ("seconds_per_token", "read_tokens_per_second"):
      assert np.isfinite(row[key]) and row[key] > 0
    assert row["seconds_per_token_fastest"] <= row["seconds_per_token"]
  grows = rows[1]["state_bytes"] > rows[0]["state_bytes"]
  assert grows == (name == "growing")


@pytest.mark.parametrize(
  "bad", [{"contexts": []}, {"contexts": [0]}, {"rounds": 0}, {"tokens": 1}]
)
def test_what_is_too_small_is_named(bad):
  with pytest.raises(errors.UserError, match=rf"{next(iter(bad))}=\d: give "):
    throughput.measure(model("constant"), **bad)


@pytest.mark.slow
def test_nothing_of_it_leaves_a_mark():
  """What is made at a context does not stand in the next round's."""
  tiny = model("constant")
  texts = np.ones((1, 9), np.int32)
  turn = throughput._Turn(tiny, session_lib.start(tiny), texts, 4)
  before = jax.tree.map(np.asarray, turn.read())
  turn.make(turn.with_room(), 4)
  jax.tree.map(np.testing.assert_array_equal, turn.read(), before)
