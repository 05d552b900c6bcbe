import functools
import types

import inference_cases as cases
import jax
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import (
  complete,
  contents,
  generate,
  prefill,
  sample,
  stop,
)
from memcomp.inference import session as session_lib
from memcomp.models import abstract

GREEDY, read = cases.GREEDY, cases.read
pieces, joined = cases.pieces, cases.joined

BYTES = tokenizer_lib.ByteTokenizer()
PROMPT = BYTES.encode("a prompt of 48 bytes, longer than several pieces")
# Lengths that need few programs: pieces are of 16, or of 8 where they begin.
SHORT, MIDDLE = PROMPT[:3], PROMPT[:32]
WARM = sample.Settings(temperature=1.0, top_k=20, top_p=0.9, seed=3)


def ids(model, prompt=PROMPT, tokens=30, settings=WARM, **more):
  (row,) = joined(
    pieces(model, read(model, [prompt]), tokens, settings, **more)
  )
  return row


@functools.partial(jax.jit, static_argnums=0)
def step(graphdef, params, token, state):
  return abstract.merge(graphdef, params).step(token, state)


def by_steps(model, tokens, state=None):
  """Logits after the last of `tokens` and the state, one token at a time."""
  if state is None:
    state = model.init_state(1)
  for token in tokens:
    logits, state = step(*nnx.split(model), np.array([token], np.int32), state)
  return np.asarray(logits[0]), state


@pytest.fixture(scope="module")
def expected(model):
  return by_steps(model, PROMPT)


# 48 ids: pieces of 16 divide them and Trellis's chunk of 8 divides a piece; of
# 22 neither, and the first begins with padding.
@pytest.mark.parametrize("size", rotation.cases([16, 22], [22]))
def test_prefill_equals_steps(model, expected, size):
  logits, state = expected
  found = read(model, [PROMPT], size)
  np.testing.assert_allclose(found.logits[0], logits, atol=2e-5)
  for a, b in zip(
    jax.tree.leaves(found.state), jax.tree.leaves(state), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=2e-5)
  assert found.position.tolist() == [48]
  assert set(np.flatnonzero(found.used[0])) == set(PROMPT.tolist())


class OnDisk:
  """A text that is read piece by piece, as a memory-mapped file."""

  def __init__(self, ids):
    self.ids, self.read = ids, []

  def __len__(self):
    return len(self.ids)

  def __getitem__(self, where):
    self.read.append(len(self.ids[where]))
    return self.ids[where]

  def __array__(self, *_, **__):
    raise AssertionError("the whole text was asked for")


def test_a_long_text_is_never_held_whole(model):
  text = OnDisk(np.tile(PROMPT, 40))
  session = read(model, [text])
  assert sum(text.read) == 48 * 40 and max(text.read) == 16
  assert session.position.tolist() == [48 * 40]
  assert session_lib.num_bytes(session) == (
    session_lib.num_bytes(session_lib.start(model))
  )


def test_ids_do_not_depend_on_the_pieces_of_the_prompt(model):
  found = ids(model)
  assert len(found) == 30
  rest = read(model, [PROMPT], 22)
  assert joined(pieces(model, rest, settings=WARM)) == [found]


def test_greedy_is_the_argmax_of_steps(model, expected):
  logits, state = expected
  made = []
  for _ in range(20):
    made.append(int(logits.argmax()))
    logits, state = by_steps(model, made[-1:], state)
  assert ids(model, tokens=20, settings=GREEDY) == made
  one = sample.Settings(temperature=1.0, top_k=1, seed=5)
  assert ids(model, tokens=20, settings=one) == made


@pytest.mark.slow
def test_a_row_depends_on_its_own_seed_and_text_alone(model):
  """Neither on other rows and their padding, nor on the cut into calls."""
  other = sample.Settings(temperature=1.0, top_k=20, top_p=0.9, seed=4)
  rows = [(SHORT, WARM), (PROMPT, other), (MIDDLE, GREEDY)]
  prompts, settings = zip(*rows, strict=True)
  alone = [ids(model, *row[:1], 30, *row[1:]) for row in rows]
  together = read(model, prompts)
  assert joined(pieces(model, together, settings=settings)) == alone
  assert joined(pieces(model, together, 12, settings)) == [
    row[:12] for row in alone
  ]
  assert alone[0] != ids(model, SHORT, 30, other)
  # And the logits, not the choice alone.
  for row, prompt in enumerate(prompts):
    np.testing.assert_allclose(
      together.logits[row], read(model, [prompt]).logits[0], atol=2e-5
    )


def test_going_on_equals_not_stopping(model):
  found = pieces(model, read(model, [PROMPT]), 32, WARM)
  *_, half = pieces(model, read(model, [PROMPT]), 16, WARM)
  after = pieces(model, half.session, 16, WARM)
  assert joined(found)[0][16:] == joined(after)[0]
  jax.tree.map(
    np.testing.assert_array_equal, after[-1].session, found[-1].session
  )


def test_reading_what_was_greedily_made_goes_on_the_same(model):
  long = ids(model, tokens=27, settings=GREEDY)
  prompt = np.concatenate([PROMPT, np.array(long[:16])])
  assert ids(model, prompt, 11, GREEDY) == long[16:]


def test_a_row_without_text_is_left_alone(model):
  before = read(model, [SHORT, MIDDLE, SHORT])
  nothing = PROMPT[:0]
  texts = [nothing, PROMPT, nothing]
  after = prefill.read(model, before, texts, piece_tokens=16)
  old, new = session_lib.split(before), session_lib.split(after)
  jax.tree.map(np.testing.assert_array_equal, new[0], old[0])
  assert after.position.tolist() == [3, 80, 3]
  whole = read(model, [np.concatenate([MIDDLE, PROMPT])])
  np.testing.assert_allclose(new[1].logits, whole.logits, atol=2e-5)


def test_ids_beyond_the_tokenizer_are_never_drawn(model):
  hot = sample.Settings(temperature=100.0)
  found = ids(model, tokens=60, settings=hot, vocab_size=16)
  assert max(found) < 16
  assert len(set(found)) > 5
  assert max(ids(model, tokens=10, settings=GREEDY, vocab_size=16)) < 16


def test_a_repetition_penalty_counts_prompt_and_text(model):
  strict = sample.Settings(temperature=0.0, repetition_penalty=1e6)
  found = ids(model, tokens=60, settings=strict)
  assert len(set(found)) == 60 and not set(found) & set(PROMPT.tolist())
  assert len(set(ids(model, tokens=60, settings=GREEDY))) < 60


def test_largest_values(model):
  settings = sample.Settings(top_k=2**40, seed=2**32 - 1)
  assert len(ids(model, tokens=3, settings=settings)) == 3


def test_one_token(model):
  assert len(ids(model, PROMPT[:1], 1)) == 1


@pytest.fixture(scope="module")
def broken(model):
  """The model, with weights that are not numbers."""
  graphdef, params = nnx.split(model)
  return nnx.merge(graphdef, jax.tree.map(lambda x: x * np.nan, params))


def test_a_model_that_is_not_finite_is_named(model, broken):
  """Neither texts of zeros nor a fault of the program."""
  session = read(model, [SHORT])
  for call in (
    lambda: read(broken, [SHORT]),
    lambda: pieces(broken, session, 3),
    lambda: contents.measure(broken, session),
  ):
    with pytest.raises(errors.UserError, match="not finite: its training"):
      call()


def test_empty_prompts(model):
  with pytest.raises(errors.UserError, match="the prompt is empty"):
    ids(model, PROMPT[:0])
  with pytest.raises(errors.UserError, match="the prompt is empty"):
    pieces(model, read(model, [PROMPT, PROMPT[:0], PROMPT]))


def test_number_of_tokens_and_texts(model):
  session = read(model, [PROMPT])
  assert pieces(model, session, 0) == []
  with pytest.raises(errors.UserError, match="tokens=-1: give 0 or more"):
    pieces(model, session, -1)
  for number, given in (
    ("tokens=2.5: give a whole", {"tokens": 2.5}),
    ("piece_tokens=0: give 1", {"piece_tokens": 0}),
    ("vocab_size=0: give 1", {"vocab_size": 0}),
  ):
    with pytest.raises(errors.UserError, match=number):
      pieces(model, session, **given)
  with pytest.raises(errors.UserError, match="piece_tokens=0: give 1"):
    read(model, [PROMPT], 0)
  with pytest.raises(errors.UserError, match="number of texts=0: give 1"):
    complete.complete(model, BYTES, [], tokens=1, rows=1)
  with pytest.raises(errors.UserError, match="2 texts for the 1 rows"):
    prefill.read(model, session, [PROMPT, PROMPT])
  with pytest.raises(errors.UserError, match="id 256 is none of the model's"):
    prefill.read(model, session, [np.array([3, 256])])
  for wrong in (2**32 + 3, -(2**32) + 3, 2**31):
    with pytest.raises(errors.UserError, match=f"id {wrong} is none"):
      prefill.read(model, session, [np.array([3, wrong])])
  with pytest.raises(errors.UserError, match="ids are float64: give whole"):
    prefill.read(model, session, [np.array([3, 1.7])])


def test_rows_stop_on_their_own(model):
  """Each keeps the state after the token that completes its stop string."""
  prompts = [SHORT, PROMPT, MIDDLE]
  session = read(model, prompts)
  free = joined(pieces(model, session, settings=GREEDY))
  places = 5, 19, None
  ends = []
  for row, place in zip(free, places, strict=True):
    if place is not None:
      ends.append(bytes(row[place - 1 : place + 1]))
  stops = stop.Stops(ends, BYTES)  # bytes: a random model makes no text
  found = pieces(model, session, settings=GREEDY, stops=stops)
  first = [
    next(
      (
        i + 1
        for i in range(len(row))
        if any(bytes(row[: i + 1]).endswith(end) for end in ends)
      ),
      None,
    )
    for row in free
  ]
  assert first[0] <= 6 and first[1] <= 20
  assert joined(found) == [row[:n] for row, n in zip(free, first, strict=True)]
  assert found[-1].stopped.tolist() == [n is not None for n in first]
  made = np.array([len(row) for row in joined(found)])
  last = found[-1].session
  assert last.position.tolist() == (np.array([3, 48, 32]) + made).tolist()
  rows = session_lib.split(session)
  for row, after in enumerate(session_lib.split(last)):
    *_, alone = pieces(model, rows[row], int(made[row]), GREEDY)
    for a, b in zip(
      jax.tree.leaves(after), jax.tree.leaves(alone.session), strict=True
    ):
      np.testing.assert_allclose(a, b, atol=2e-5)


def test_only_what_the_tokenizer_of_the_stop_strings_knows_is_drawn(model):
  """A model's vocabulary may be larger, and its table has no such column."""
  stops = stop.Stops(["end"], BYTES)
  known = min(ids(model, settings=GREEDY))
  narrow = types.SimpleNamespace(
    table=stops.table[:, :known], final=stops.final
  )
  assert max(ids(model, settings=GREEDY, stops=narrow)) < known


def test_text_is_the_decoded_ids(model):
  shown = generate.text(model, BYTES, "def ", tokens=25, settings=WARM)
  made = ids(model, BYTES.encode("def "), 25)
  assert "".join(shown) == BYTES.decode(made)


def test_text_ends_before_a_stop_string(model):
  ascii_only = sample.Settings(temperature=0.7, seed=1)
  whole = "".join(
    generate.text(model, BYTES, "def ", tokens=40, settings=ascii_only)
  )
  place = next(i for i in range(10, 40) if whole[i : i + 2].isascii())
  end = whole[place : place + 2]
  shown = generate.text(
    model, BYTES, "def ", tokens=40, settings=ascii_only, stop_strings=[end]
  )
  assert "".join(shown) == whole[: whole.index(end)]
