"""Sessions: what a model has read, as a value.

A session is an immutable tree of arrays, so keeping the old one is a free fork.
Rows are independent texts. Memories of constant size never change shape.
Growing memories (full attention, Key-Value Means) are reallocated between
calls.
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

from memcomp import errors, limits
from memcomp.models import abstract, decoder, unstacked

LEAST_ROOM = 256
"""Initial capacity of growing memories in tokens; it doubles."""


class Session(NamedTuple):
  """Texts that a model has read, and everything needed to continue.

  Attributes:
    state: state of the model.
    logits: float32 `[batch, vocab]` of the next token; zeros before any token.
    position: int32 `[batch]`, tokens of each text so far.
    used: bool `[batch, vocab]`, ids that occur in each text.
  """

  state: decoder.DecoderState
  logits: jax.Array
  position: jax.Array
  used: jax.Array


def start(model: decoder.Decoder, batch: int = 1, tokens: int = 0) -> Session:
  """Returns `batch` empty texts with room for `tokens` each."""
  graphdef, params = nnx.split(model)
  with on_mesh_of(params):
    return _start(graphdef, batch, room_for(tokens), params)


def grow(model: decoder.Decoder, session: Session, tokens: int) -> Session:
  """Enlarges growing memories if they lack room.

  Args:
    model: the session's model.
    session: any session.
    tokens: longest text that must fit, including tokens already read.
      Capacities are powers of two, to compile few programs.

  Returns:
    The same texts with more room.
  """
  room = room_for(tokens)
  graphdef, params = nnx.split(model)
  batch = len(session.position)
  target = jax.eval_shape(
    functools.partial(_start, graphdef, batch, room), params
  )
  return jax.tree.map(lambda x, to: _pad(x, to.shape), session, target)


def room_for(tokens: int) -> int:
  """Returns the capacity of growing memories for a text of this length."""
  return max(LEAST_ROOM, 1 << max(tokens - 1, 0).bit_length())


def fork(session: Session, copies: int) -> Session:
  """Returns `copies` of every text; copies of one text are adjacent."""
  if copies < 1:
    raise errors.UserError(f"copies={copies}: give 1 or more")
  return _by_row(lambda axis, x: jnp.repeat(x, copies, axis), session)


def pick(session: Session, rows: np.ndarray | jax.Array) -> Session:
  """Returns the texts of `rows` `[batch]`, in that order; rows may repeat.

  Raises:
    UserError: there is no such row. Under `jax.jit` its text is nan instead.
  """
  batch = len(session.position)
  if not isinstance(rows, jax.core.Tracer):
    rows = np.asarray(rows)
    for row in rows:
      limits.check("row", row, -batch, batch - 1)
  return _pick(session, rows)


@jax.jit
def _pick(session: Session, rows: jax.Array) -> Session:
  return _by_row(lambda axis, x: jnp.take(x, rows, axis), session)


def join(sessions: Sequence[Session]) -> Session:
  """Returns the texts of several sessions of one model as one batch.

  Raises:
    UserError: there are no sessions.
  """
  limits.check("number of sessions", len(sessions))

  def together(axis, *xs):
    # Growing memories may have room for different lengths.
    shape = np.max([x.shape for x in xs], axis=0)
    xs = [
      _pad(x, [*shape[:axis], x.shape[axis], *shape[axis + 1 :]]) for x in xs
    ]
    return jnp.concatenate(xs, axis)

  return _by_row(together, *sessions)


def split(session: Session) -> list[Session]:
  """Returns a separate session for each text."""
  return [
    _by_row(lambda axis, x, row=row: x.take(jnp.array([row]), axis), session)
    for row in range(len(session.position))
  ]


def num_bytes(session: Session) -> int:
  """Bytes of the model's state for all texts."""
  return sum(x.nbytes for x in jax.tree.leaves(session.state))


def where(condition: jax.Array, new: Session, old: Session) -> Session:
  """Selects rows from `new` where `condition` `[batch]` holds, else `old`."""

  def select(axis, x, y):
    shape = [1] * x.ndim
    shape[axis] = -1
    return jnp.where(condition.reshape(shape), x, y)

  return _by_row(select, new, old)


def on_mesh_of(params: Any) -> contextlib.AbstractContextManager:
  """Sets the mesh of `params`; does nothing for one device."""
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
  # Remove weak types: no call returns them, so the second call would recompile.
  return jax.tree.map(lambda x: x.astype(x.dtype), session)


def _pad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Pads `x` with trailing zeros to `shape`; longer axes stay as they are."""
  missing = [(0, max(b - a, 0)) for a, b in zip(x.shape, shape, strict=True)]
  return jnp.pad(x, missing) if any(n for _, n in missing) else x


def _by_row(function: Callable[..., Any], *sessions: Session) -> Session:
  """Maps `function(row axis, *leaves)` over sessions."""

  def stack(*states):
    # Stacked states have the layer axis before the row axis.
    axis = 0 if isinstance(states[0], unstacked.Unstacked) else 1
    return jax.tree.map(functools.partial(function, axis), *states)

  layers = tuple(map(stack, *(s.state.layers for s in sessions)))
  rest = jax.tree.map(
    functools.partial(function, 0),
    *[s._replace(state=s.state._replace(layers=())) for s in sessions],
  )
  return rest._replace(state=rest.state._replace(layers=layers))
