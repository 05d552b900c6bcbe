"""Measures the contents of a session's memories, layer by layer."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp import errors, prng
from memcomp.inference import generate, sample
from memcomp.inference import session as session_lib
from memcomp.models import abstract, decoder

PROBE = 64
"""Tokens over which a change of a memory is followed."""

_CHANGE = 0.01
_LONGEST = 100 * PROBE


class Layer(NamedTuple):
  """The memories of one layer for one text; means over memories and heads.

  Attributes:
    mixer: class name of the mixer.
    shapes: shapes of its memories, `heads, ..., rows, columns`.
    norm: root mean square of their numbers.
    filled: fraction of rows that are not zero, in [0, 1].
    directions: effective rank, exp of the entropy of the squared singular
      values; 1 if all rows are multiples of one, 0 if all are zero.
    most: maximum effective rank, the smaller side.
    horizon: number of tokens until a small random change of the memories has
      shrunk to 1 / e, extrapolated from `PROBE` tokens; inf above 100 times
      `PROBE`.
  """

  mixer: str
  shapes: tuple[tuple[int, ...], ...]
  norm: float
  filled: float
  directions: float
  most: float
  horizon: float


def measure(
  model: decoder.Decoder, session: session_lib.Session
) -> list[Layer]:
  """Measures every layer of a session of one text.

  Horizons follow a sampled continuation of `PROBE` tokens.

  Raises:
    UserError: there is no text, or more than one.
  """
  if len(session.position) != 1:
    raise errors.UserError("split the session: one text at a time is measured")
  if not session.position[0]:
    raise errors.UserError("nothing has been read yet; there is nothing to see")
  followed = list(
    generate.generate(model, session, tokens=PROBE, settings=sample.Settings())
  )
  ids = np.concatenate([piece.ids[0] for piece in followed])[None]
  graphdef, params = nnx.split(model)
  session = session_lib.grow(model, session, int(session.position[0]) + PROBE)
  layers = []
  for depth in range(model.num_layers):
    block, state = model.layer(depth, session.state)
    memories = [np.asarray(x[0]) for x in block.mixer.memories(state.mixer)]
    with session_lib.on_mesh_of(params):
      before, after = follow(graphdef, params, session.state, ids, depth)
    ranks = [directions(x) for x in memories]
    layers.append(
      Layer(
        mixer=type(block.mixer).__name__,
        shapes=tuple(x.shape for x in memories),
        norm=math.sqrt(
          sum(np.sum(np.square(x, dtype=np.float64)) for x in memories)
          / sum(x.size for x in memories)
        ),
        filled=float(np.mean([np.any(x, axis=-1).mean() for x in memories])),
        directions=float(np.mean(ranks)),
        most=float(np.mean([min(x.shape[-2:]) for x in memories])),
        horizon=horizon(float(before), float(after)),
      )
    )
  return layers


def directions(memory: np.ndarray) -> float:
  """Mean effective rank of the matrices in `[..., rows, columns]`."""
  x = np.asarray(memory, np.float64).reshape(-1, *memory.shape[-2:])
  squares = np.square(np.linalg.svd(x, compute_uv=False))
  total = squares.sum(axis=1, keepdims=True)
  share = squares / np.where(total > 0, total, 1)
  logs = np.log(np.where(share > 0, share, 1))
  return float(
    np.mean(np.exp(-np.sum(share * logs, axis=1)) * (total[:, 0] > 0))
  )


def table(layers: list[Layer]) -> str:
  """Returns a printable table with one line per layer."""
  heads = "layer", "memory", "norm", "rows filled", "directions in use"
  lines = [(*heads, "fades to 1/e after")]
  for depth, layer in enumerate(layers):
    shapes = " + ".join("x".join(map(str, shape)) for shape in layer.shapes)
    share = layer.directions / layer.most
    bar = "#" * round(10 * share)
    horizon = f"{layer.horizon:,.0f} tokens"
    if math.isinf(layer.horizon):
      horizon = f"more than {_LONGEST:,} tokens"
    lines.append(
      (
        str(depth),
        f"{layer.mixer} {shapes}",
        f"{layer.norm:.3g}",
        f"{layer.filled:.0%}",
        f"[{bar:<10}] {layer.directions:.1f} of {layer.most:g}",
        horizon,
      )
    )
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    ).rstrip()
    for line in lines
  )


def horizon(before: float, after: float) -> float:
  """Tokens until a change shrinks to 1 / e, given its decay over `PROBE`."""
  if not before or after >= before:
    return math.inf
  if not after:
    return 0.0
  tokens = PROBE / math.log(before / after)
  return tokens if tokens < _LONGEST else math.inf


@functools.partial(jax.jit, static_argnums=0)
def follow(graphdef, params, state, ids, depth):
  """Size of a change in a layer's memories, at first and after `ids`."""
  model = abstract.merge(graphdef, params)
  changed = state._replace(
    layers=tuple(
      _change(model, index, of_stack, depth)
      for index, of_stack in enumerate(state.layers)
    )
  )

  def distance(a, b):
    total = jnp.zeros(())
    for index in range(len(model.stacks)):
      here = _is_at(model.stacks[index], depth)
      for x, y in zip(
        _memories(model, index, a.layers[index]),
        _memories(model, index, b.layers[index]),
        strict=True,
      ):
        each = jnp.sum(jnp.square(x - y), axis=tuple(range(1, x.ndim)))
        total += jnp.sum(jnp.where(here, each, 0))
    return jnp.sqrt(total)

  (_, one), (_, other) = (model.hidden(ids, state=s) for s in (state, changed))
  return distance(changed, state), distance(other, one)


def _change(model, index, state, depth):
  """Multiplies the memories of one layer by 1 + random noise."""
  memories = _memories(model, index, state)
  here = _is_at(model.stacks[index], depth)

  def one(x):
    # Change only the state leaves that are memories.
    if not any(x is memory for memory in memories):
      return x
    noise = jax.random.normal(prng.key(0), x.shape, x.dtype)
    share = _CHANGE * here.reshape(-1, *[1] * (x.ndim - 1))
    return x * (1 + share * noise)

  return jax.tree.map(one, state)


def _memories(model, index, state):
  """Memories of a stack, `[layers, batch, heads, ...]`."""
  return model.layers[str(index)].mixer.memories(state.mixer)


def _is_at(stack, depth):
  return jnp.array(stack.depths) == depth
