import functools

import jax
import numpy as np
import pytest
from flax import nnx

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import generate, sample
from memcomp.training import state as state_lib

PROMPT = np.frombuffer(
  b"a prompt of 48 bytes, longer than several pieces", np.uint8
)
GREEDY = sample.Settings(temperature=0.0)
WARM = sample.Settings(temperature=1.0, top_k=20, top_p=0.9, seed=3)


def ids(model, prompt=PROMPT, tokens=30, settings=WARM, **more):
  return list(
    generate.generate(model, prompt, tokens=tokens, settings=settings, **more)
  )


@functools.partial(jax.jit, static_argnums=0)
def step(graphdef, params, token, state):
  return state_lib.merge(graphdef, params).step(token, state)


def by_steps(model, tokens, state=None):
  """Logits after the last of `tokens` and the state, one token at a time."""
  if state is None:
    state = model.init_state(1)
  for token in tokens:
    logits, state = step(*nnx.split(model), np.array([token], np.int32), state)
  return np.asarray(logits[0]), state


# 48 ids: pieces of 16 divide them and Trellis's chunk of 8 divides a piece; of
# 13 neither; one piece; and a piece larger than the prompt.
@pytest.mark.parametrize("pieces", [16, 13, 48, 1000])
def test_prefill_equals_steps(model, pieces):
  expected, state = by_steps(model, PROMPT)
  logits, found = generate.prefill(model, PROMPT, pieces)
  np.testing.assert_allclose(logits, expected, atol=2e-5)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_ids_do_not_depend_on_the_pieces_of_the_prompt(model):
  expected = ids(model)
  assert len(expected) == 30
  for pieces in (16, 13):
    assert ids(model, prefill_tokens=pieces) == expected


def test_greedy_is_the_argmax_of_steps(model):
  logits, state = by_steps(model, PROMPT)
  expected = []
  for _ in range(20):
    expected.append(int(logits.argmax()))
    logits, state = by_steps(model, expected[-1:], state)
  assert ids(model, tokens=20, settings=GREEDY) == expected
  one = sample.Settings(temperature=1.0, top_k=1, seed=5)
  assert ids(model, tokens=20, settings=one) == expected


def test_a_draw_depends_on_seed_and_text_alone(model):
  first = ids(model)
  assert ids(model) == first
  assert ids(model, tokens=12) == first[:12]
  other = sample.Settings(temperature=1.0, top_k=20, top_p=0.9, seed=4)
  assert ids(model, settings=other) != first


def test_continuing_from_what_was_greedily_made(model):
  long = ids(model, tokens=20, settings=GREEDY)
  prompt = np.concatenate([PROMPT, np.array(long[:9])])
  assert ids(model, prompt, 11, GREEDY) == long[9:]


def test_ids_beyond_the_tokenizer_are_never_drawn(model):
  hot = sample.Settings(temperature=100.0)
  found = ids(model, tokens=60, settings=hot, vocab_size=16)
  assert max(found) < 16
  assert len(set(found)) > 5
  assert max(ids(model, tokens=10, settings=GREEDY, vocab_size=16)) < 16


def test_largest_values(model):
  settings = sample.Settings(top_k=2**40, seed=2**32 - 1)
  assert len(ids(model, tokens=3, settings=settings)) == 3


@pytest.mark.parametrize("length", [1, 2])
def test_shortest_prompts(model, length):
  assert len(ids(model, PROMPT[:length], 3)) == 3


def test_empty_prompt(model):
  with pytest.raises(errors.UserError, match="the prompt is empty"):
    ids(model, PROMPT[:0])


def test_number_of_tokens(model):
  assert ids(model, tokens=0) == []
  with pytest.raises(errors.UserError, match="tokens=-1: give 0 or more"):
    ids(model, tokens=-1)


def test_text_appears_as_it_is_made(model, monkeypatch):
  made = "añ→z".encode() + b"\xff" + "ñ".encode()[:1]
  monkeypatch.setattr(generate, "generate", lambda *args, **more: iter(made))
  pieces = generate.text(
    model,
    tokenizer_lib.ByteTokenizer(),
    "x",
    tokens=len(made),
    settings=GREEDY,
  )
  assert list(pieces) == ["a", "ñ", "→", "z", "�", "�"]


def test_text_is_the_decoded_ids(model):
  tokenizer = tokenizer_lib.ByteTokenizer()
  pieces = generate.text(model, tokenizer, "def ", tokens=25, settings=WARM)
  expected = ids(model, tokenizer.encode("def "), 25)
  assert "".join(pieces) == tokenizer.decode(expected)
