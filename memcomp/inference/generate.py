"""Continues a prompt: prefill with the chunk form, then token by token."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import sample
from memcomp.models import decoder
from memcomp.training import state as state_lib

PREFILL = 1024
"""Tokens of a prompt read in one call, which bounds its memory."""


def text(
  model: decoder.Decoder,
  tokenizer: tokenizer_lib.Tokenizer,
  prompt: str,
  *,
  tokens: int,
  settings: sample.Settings,
) -> Iterator[str]:
  """Yields the continuation of a prompt as it is made.

  A piece is what one token completes: characters whose bytes come in several
  tokens appear whole, bytes that are no UTF-8 as U+FFFD.

  Raises:
    UserError: the prompt is empty, or `tokens` negative.
  """
  ids = tokenizer.encode(prompt)
  decode = tokenizer_lib.Decoder(tokenizer)
  for token in generate(
    model,
    ids,
    tokens=tokens,
    settings=settings,
    vocab_size=tokenizer.vocab_size,
  ):
    if piece := decode.push(token):
      yield piece
  if piece := decode.finish():
    yield piece


def generate(
  model: decoder.Decoder,
  prompt: np.ndarray,
  *,
  tokens: int,
  settings: sample.Settings,
  vocab_size: int | None = None,
  prefill_tokens: int = PREFILL,
) -> Iterator[int]:
  """Yields the ids that continue a prompt.

  The i-th draw depends on the seed, i and the text so far alone.

  Args:
    model: the language model.
    prompt: ids `[time]`, at least one.
    tokens: how many to make.
    settings: how they are drawn.
    vocab_size: ids from here on are never drawn: those of a model whose
      vocabulary is larger than its tokenizer's; None is the model's.
    prefill_tokens: of the prompt in one call; changes nothing but rounding.

  Raises:
    UserError: the prompt is empty, or `tokens` negative.
  """
  if tokens < 0:
    raise errors.UserError(f"tokens={tokens}: give 0 or more")
  if not len(prompt):
    raise errors.UserError(
      "the prompt is empty, and the model predicts from what stands before: "
      "give at least one character"
    )
  if not tokens:
    return
  graphdef, params = nnx.split(model)
  logits, state = prefill(
    model, prompt, prefill_tokens, length=len(prompt) + tokens
  )
  key = jax.random.key(settings.seed)
  # No vocabulary needs more than 31 bits; a larger top_k means all.
  top_k = min(settings.top_k, 2**31 - 1)
  knobs = (settings.temperature, top_k, settings.top_p)
  token = _draw(vocab_size, logits, key, 0, knobs)
  yield int(token)
  for i in range(1, tokens):
    token, state = _next(
      graphdef, vocab_size, params, state, token, key, i, knobs
    )
    yield int(token)


def prefill(
  model: decoder.Decoder,
  prompt: np.ndarray,
  pieces_of: int = PREFILL,
  *,
  length: int | None = None,
) -> tuple[jax.Array, decoder.DecoderState]:
  """Reads a prompt `[time]` in pieces.

  Args:
    model: the language model.
    prompt: ids.
    pieces_of: tokens of the prompt in one call.
    length: tokens that the state must have room for, the prompt's included,
      for memories that grow; default the prompt alone and one more.

  Returns:
    Logits `[vocab]` of what follows its last token, and the state (batch 1).
  """
  graphdef, params = nnx.split(model)
  ids = np.asarray(prompt, np.int32)[None]
  room = max(length or 0, ids.shape[1] + 1)
  # A power of two, so that few programs are compiled.
  state = _fresh(graphdef, 1 << (room - 1).bit_length(), params)
  logits = jnp.zeros(0)
  for start in range(0, ids.shape[1], pieces_of):
    piece = ids[:, start : start + pieces_of]
    logits, state = _read(graphdef, params, state, piece)
  return logits, state


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fresh(graphdef, length, params) -> decoder.DecoderState:
  return state_lib.merge(graphdef, params).init_state(1, length)


@functools.partial(jax.jit, static_argnums=0)
def _read(graphdef, params, state, ids) -> tuple[jax.Array, Any]:
  model = state_lib.merge(graphdef, params)
  hidden, state = model(ids, state=state)
  return model.logits(hidden[:, -1])[0], state


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next(graphdef, vocab_size, params, state, token, key, index, knobs):
  """Feeds `token`; returns the one after it, and the state."""
  model = state_lib.merge(graphdef, params)
  logits, state = model.step(token[None], state)
  return _draw(vocab_size, logits[0], key, index, knobs), state


@functools.partial(jax.jit, static_argnums=0)
def _draw(vocab_size, logits, key, index, knobs):
  temperature, top_k, top_p = knobs
  known = jnp.arange(logits.shape[0]) < (vocab_size or logits.shape[0])
  return sample.draw(
    jnp.where(known, logits, -jnp.inf),
    jax.random.fold_in(key, index),
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
  )
