"""Sessions: what a model has read, as a value.

A session is a tree of arrays that no call changes: keeping the old one is a
fork, at no cost. Rows are texts side by side; memories of constant size never
change shape, those that grow (full attention, Key-Value Means) are re-allocated
between calls.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from memcomp import errors
from memcomp.models import abstract, apart, decoder

LEAST_ROOM = 256
"""Tokens that the memories of a new session have room for; it doubles."""


class Session(NamedTuple):
  """Texts that a model has read, and all it needs to go on.

  Attributes:
    state: of the model.
    logits: float32 `[batch, vocab]`, of what follows; zeros before any token.
    position: int32 `[batch]`, tokens of each text so far.
    used: bool `[batch, vocab]`, ids that stand in each text.
  """

  state: decoder.DecoderState
  logits: jax.Array
  position: jax.Array
  used: jax.Array


def start(model: decoder.Decoder, batch: int = 1, tokens: int = 0) -> Session:
  """Returns `batch` texts without a token, with room for `tokens` each."""
  graphdef, params = nnx.split(model)
  with on_mesh_of(params):
    return _start(graphdef, batch, room_for(tokens), params)


def grow(model: decoder.Decoder, session: Session, tokens: int) -> Session:
  """Gives growing memories room; they stay as they are if they have it.

  Args:
    model: whose session it is.
    session: any.
    tokens: of the longest text that shall fit, those read included. Room comes
      in powers of two, so that few programs are compiled.

  Returns:
    The same texts; nothing but the room has changed.
  """
  room = room_for(tokens)
  graphdef, params = nnx.split(model)
  batch = len(session.position)
  target = jax.eval_shape(
    functools.partial(_start, graphdef, batch, room), params
  )
  return jax.tree.map(lambda x, to: _pad(x, to.shape), session, target)


def room_for(tokens: int) -> int:
  """Returns the room that memories which grow have for a text so long."""
  return max(LEAST_ROOM, 1 << max(tokens - 1, 0).bit_length())


def fork(session: Session, copies: int) -> Session:
  """Returns `copies` of every text, those of one text side by side."""
  if copies < 1:
    raise errors.UserError(f"copies={copies}: give 1 or more")
  return _by_row(lambda axis, x: jnp.repeat(x, copies, axis), session)


@jax.jit
def pick(session: Session, rows: np.ndarray | jax.Array) -> Session:
  """Returns the texts of `rows` `[batch]`, in their order, also repeated."""
  return _by_row(lambda axis, x: jnp.take(x, rows, axis), session)


def join(sessions: Sequence[Session]) -> Session:
  """Returns the texts of some sessions of one model as one batch."""

  def together(axis, *xs):
    # Memories that grow may have room for different lengths.
    shape = np.max([x.shape for x in xs], axis=0)
    xs = [
      _pad(x, [*shape[:axis], x.shape[axis], *shape[axis + 1 :]]) for x in xs
    ]
    return jnp.concatenate(xs, axis)

  return _by_row(together, *sessions)


def split(session: Session) -> list[Session]:
  """Returns each text of a session as one of its own."""
  return [
    _by_row(lambda axis, x, row=row: x.take(jnp.array([row]), axis), session)
    for row in range(len(session.position))
  ]


def num_bytes(session: Session) -> int:
  """Bytes of the model's state, all texts together."""
  return sum(x.nbytes for x in jax.tree.leaves(session.state))


def where(condition: jax.Array, new: Session, old: Session) -> Session:
  """Returns `new` in the rows where `condition` `[batch]` holds, else `old`."""

  def select(axis, x, y):
    shape = [1] * x.ndim
    shape[axis] = -1
    return jnp.where(condition.reshape(shape), x, y)

  return _by_row(select, new, old)


def on_mesh_of(params: Any) -> contextlib.AbstractContextManager:
  """Sets the mesh that `params` lie on; nothing where that is one device."""
  for leaf in jax.tree.leaves(params):
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    if isinstance(mesh, Mesh) and mesh.size > 1:
      return jax.set_mesh(mesh)
  return contextlib.nullcontext()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _start(graphdef, batch, room, params) -> Session:
  model = abstract.merge(graphdef, params)
  vocab = model.embedding[...].shape[0]
  session = Session(
    model.init_state(batch, room),
    jnp.zeros((batch, vocab), jnp.float32),
    jnp.zeros(batch, jnp.int32),
    jnp.zeros((batch, vocab), bool),
  )
  # Without weak types, which no call gives back: the second would be compiled
  # anew.
  return jax.tree.map(lambda x: x.astype(x.dtype), session)


def _pad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Pads `x` behind with zeros to `shape`, but for axes that are longer."""
  missing = [(0, max(b - a, 0)) for a, b in zip(x.shape, shape, strict=True)]
  return jnp.pad(x, missing) if any(n for _, n in missing) else x


def _by_row(function: Callable[..., Any], *sessions: Session) -> Session:
  """Maps `function(axis of rows, *leaves)` over sessions."""

  def stack(*states):
    # Where layers are not apart they are stacked, at axis 0.
    axis = 0 if isinstance(states[0], apart.Apart) else 1
    return jax.tree.map(functools.partial(function, axis), *states)

  layers = tuple(map(stack, *(s.state.layers for s in sessions)))
  rest = jax.tree.map(
    functools.partial(function, 0),
    *[s._replace(state=s.state._replace(layers=())) for s in sessions],
  )
  return rest._replace(state=rest.state._replace(layers=layers))
