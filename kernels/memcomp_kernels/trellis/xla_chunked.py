"""Trellis in chunk form on matrix units, in plain JAX.

With stale gradients one tile is one chunk of the paper. Its start memory M
gives all write directions at once, and mu, Omega (`primitives.decay`) turn the
recurrence into matrix products (rows are tokens, W the written keys or values,
g the write rates):

  Z = W M^T,  U = J_phi(Z)^T (phi(Z) - alpha)
  pass 1  R = diag(mu) Q M_K^T - (Omega * (Q K^T) diag(g)) U_K,   F = f(R)
  pass 2  Y = diag(mu) F M_V   - (Omega * (F U_V^T) diag(g)) V
  next    M <- mu_C M - (U * g * Omega_C)^T W

Chunks belong to sequences, not to the grid of the call: a state may arrive in
the middle of a chunk, and a packed segment starts a chunk wherever it starts.
Tokens are then laid into tiles by index, each chunk into a tile of its own.

The gradient is a reverse scan over tiles that recomputes each tile from its
start memory: only inputs and chunk-start memories are kept.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.primitives import activations, decay, tiles
from memcomp_kernels.trellis import reference, tilings, types

# Tokens between two saved states where Trellis is scanned token by token.
_SCAN_BLOCK = 32

Memories = tuple[jax.Array, jax.Array]


def _product(equation: str, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
  """A matrix product of `dtype` operands, summed in float32 or wider."""
  # bfloat16 operands are one pass of a matrix unit. float32 ones would be
  # rounded to bfloat16 by default on a TPU: whoever hands in float32 wants it.
  precision = (
    lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
  )
  return jnp.einsum(
    equation,
    a.astype(dtype),
    b.astype(dtype),
    precision=precision,
    preferred_element_type=jnp.promote_types(dtype, jnp.float32),
  )


def _tile(memories, starts, inputs: types.Inputs, spec: types.Spec):
  """One chunk: (M_K, M_V), gradients at `starts` -> new (M_K, M_V), Y.

  Arrays are `[batch, heads, chunk, ...]`. `starts` is `memories` itself but for
  a chunk that began in an earlier call.
  """
  dtype = inputs.query.dtype
  product = functools.partial(_product, dtype=dtype)
  wide = memories[0].dtype
  target = inputs.target.astype(wide)
  log_decay = jnp.moveaxis(inputs.log_decay.astype(wide), -1, 0)
  if not spec.forget_gate:
    log_decay = jnp.zeros_like(log_decay)
  rate = jnp.moveaxis(inputs.write_rate.astype(wide), -1, 0)
  factors = decay.decay_factors(log_decay)
  weights = factors.between * rate[..., None, :]
  to_end = factors.to_end * rate

  def directions(start, written):
    z = product("bhmd,bhcd->bhcm", start, written)
    if spec.first_order:
      z = lax.stop_gradient(z)
    return activations.write_direction(spec.phi, z, target, spec.phi_eps)

  def advance(memory, u, written, gate):
    kept = factors.total[gate][..., None, None] * memory
    u = u * to_end[gate][..., None]
    return kept - product("bhcm,bhcd->bhmd", u, written)

  key_memory, value_memory = memories
  u_key = directions(starts[0], inputs.key)
  u_value = directions(starts[1], inputs.value)

  scores = product("bhrd,bhid->bhri", inputs.query, inputs.key) * weights[0]
  read = product("bhmd,bhcd->bhcm", key_memory, inputs.query)
  read = factors.from_start[0][..., None] * read
  read = read - product("bhri,bhim->bhrm", scores, u_key)
  code = activations.activate(spec.read_activation, read, spec.read_eps)

  scores = product("bhrm,bhim->bhri", code, u_value) * weights[-1]
  output = product("bhcm,bhmd->bhcd", code, value_memory)
  output = factors.from_start[-1][..., None] * output
  output = output - product("bhri,bhid->bhrd", scores, inputs.value)
  if spec.value_readout_phi:
    output = activations.activate(spec.phi, output, spec.phi_eps)

  memories = (
    advance(key_memory, u_key, inputs.key, 0),
    advance(value_memory, u_value, inputs.value, -1),
  )
  return memories, output.astype(dtype)


class _Operands(NamedTuple):
  """What `chunk` is differentiable in; memories are pairs (key, value)."""

  memories: Memories
  chunk_start: Memories
  reset: Memories
  inputs: types.Inputs


class _Result(NamedTuple):
  """What `chunk` computes; `chunk_start` is that of the last token's chunk."""

  memories: Memories
  chunk_start: Memories
  outputs: jax.Array


def _body(spec, reset, carry, tile):
  """Scan body over tiles; carry is (memories, start of the current chunk)."""
  memories, current_start = carry
  inputs, flags = tile
  if flags is None:
    starts = memories
  else:
    memories = contract.batched_where(flags.resets, reset, memories)
    starts = contract.batched_where(flags.continues, current_start, memories)
    current_start = contract.batched_where(
      flags.occupied, starts, current_start
    )
  memories, outputs = _tile(memories, starts, inputs, spec)
  return (memories, starts if flags is None else current_start), outputs


def _tiles_forward(spec, layout, operands: _Operands):
  """Returns the result, and the memories before each tile."""
  laid = jax.tree.map(lambda x: tiles.lay(layout, x), operands.inputs)

  def body(carry, tile):
    new_carry, outputs = _body(spec, operands.reset, carry, tile)
    return new_carry, (outputs, carry[0])

  carry = operands.memories, operands.chunk_start
  carry, (outputs, before) = lax.scan(body, carry, (laid, layout.flags))
  time = operands.inputs.query.shape[1]
  return _Result(*carry, tiles.unlay(layout, outputs, time)), before


def _tiles_backward(spec, layout, operands: _Operands, before, cotangents):
  """Reverse scan over tiles, each recomputed from the memories before it."""
  laid = jax.tree.map(lambda x: tiles.lay(layout, x), operands.inputs)
  d_outputs = tiles.lay(layout, cotangents.outputs)

  def body(carry, x):
    d_carry, d_reset = carry
    memories, inputs, flags, d_outputs = x
    # Only a tile that continues a chunk reads the current chunk's start, and
    # that is always the start which was handed in.
    _, vjp = jax.vjp(
      lambda reset, carry, inputs: _body(spec, reset, carry, (inputs, flags)),
      operands.reset,
      (memories, operands.chunk_start),
      inputs,
    )
    d_reset_tile, d_carry, d_inputs = vjp((d_carry, d_outputs))
    if flags is not None:
      d_reset = jax.tree.map(jnp.add, d_reset, d_reset_tile)
    return (d_carry, d_reset), d_inputs

  d_carry = cotangents.memories, cotangents.chunk_start
  d_reset = jax.tree.map(jnp.zeros_like, operands.reset)
  (d_carry, d_reset), d_inputs = lax.scan(
    body,
    (d_carry, d_reset),
    (before, laid, layout.flags, d_outputs),
    reverse=True,
  )
  time = operands.inputs.query.shape[1]
  d_inputs = jax.tree.map(lambda x: tiles.unlay(layout, x, time), d_inputs)
  d_memories, d_chunk_start = d_carry
  return _Operands(d_memories, d_chunk_start, d_reset, d_inputs)


def _token_scan(spec, position, segment_id, segment_ids, operands: _Operands):
  """The result by scanning tokens, checkpointed every few."""

  def state(memories, chunk_start):
    return _state(memories, chunk_start, position, segment_id)

  final, outputs = contract.scan(
    functools.partial(reference.step, spec=spec),
    state(operands.memories, operands.chunk_start),
    operands.inputs,
    segment_ids=segment_ids,
    reset_state=state(operands.reset, operands.reset)._replace(
      position=jnp.zeros_like(position)
    ),
    block=_SCAN_BLOCK,
  )
  return _Result(
    (final.key_memory, final.value_memory),
    (final.key_memory_start, final.value_memory_start),
    outputs,
  )


class _Plan(NamedTuple):
  """How a call is evaluated: `usual` if `use_usual` else `otherwise`.

  Each is a `tiles.Layout`, or None for the token scan; both give the same
  result. `use_usual` is None where `usual` always serves.
  """

  where: tiles.Places
  use_usual: jax.Array | None
  usual: Callable[[], tiles.Layout]
  otherwise: Callable[[], tiles.Layout | None]
  num_saved: int


def _plan(spec, position, segment_id, segment_ids, time) -> _Plan:
  chunk = spec.chunk_size
  where = tiles.places(
    segment_ids, segment_id, position, time=time, chunk=chunk
  )
  indexed = functools.partial(tiles.indexed, where, position, chunk=chunk)
  whole = -(-time // chunk)
  if segment_ids is None:
    return _Plan(
      where,
      use_usual=jnp.all(position == 0),
      usual=lambda: tiles.aligned(chunk),
      otherwise=lambda: indexed(num_tiles=whole + 1),
      num_saved=whole,
    )
  # Every segment may leave a tile part empty. Rows cut into more segments than
  # this are scanned by token: exact as well, slower, and rare.
  num_tiles = tilings.tiles_for_packing(whole)
  if num_tiles > time:
    num_tiles = time + 1
    return _Plan(
      where,
      use_usual=None,
      usual=lambda: indexed(num_tiles=num_tiles),
      otherwise=lambda: None,
      num_saved=num_tiles,
    )
  return _Plan(
    where,
    use_usual=where.needed <= num_tiles,
    usual=lambda: indexed(num_tiles=num_tiles),
    otherwise=lambda: None,
    num_saved=num_tiles,
  )


def _evaluate(plan: _Plan, run: Callable, operands):
  """Runs `run(layout, operands)` with the layout that the plan selects."""

  def usual(operands):
    return run(plan.usual(), operands)

  def otherwise(operands):
    return run(plan.otherwise(), operands)

  if plan.use_usual is None:
    return usual(operands)
  return lax.cond(plan.use_usual, usual, otherwise, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunk(spec, position, segment_id, segment_ids, operands: _Operands):
  return _chunk_fwd(spec, position, segment_id, segment_ids, operands)[0]


def _chunk_fwd(spec, position, segment_id, segment_ids, operands):
  time = operands.inputs.query.shape[1]
  plan = _plan(spec, position, segment_id, segment_ids, time)

  def run(layout, operands):
    if layout is None:
      result = _token_scan(spec, position, segment_id, segment_ids, operands)
      saved = jax.tree.map(
        lambda x: jnp.zeros((plan.num_saved, *x.shape), x.dtype),
        operands.memories,
      )
      return result, saved
    result, before = _tiles_forward(spec, layout, operands)
    # What is saved has one shape whatever the layout: one tile more than
    # `num_saved` means that the first, whose memories came in, is left out.
    extra = jax.tree.leaves(before)[0].shape[0] - plan.num_saved
    return result, jax.tree.map(lambda x: x[extra:], before)

  result, saved = _evaluate(plan, run, operands)
  return result, (position, segment_id, segment_ids, operands, saved)


def _chunk_bwd(spec, residuals, cotangents):
  position, segment_id, segment_ids, operands, saved = residuals
  time = operands.inputs.query.shape[1]
  plan = _plan(spec, position, segment_id, segment_ids, time)

  def run(layout, operands_):
    operands, saved, cotangents = operands_
    if layout is None:
      scan = functools.partial(
        _token_scan, spec, position, segment_id, segment_ids
      )
      return jax.vjp(scan, operands)[1](cotangents)[0]
    if layout.flags is not None:
      missing = layout.flags.occupied.shape[0] - plan.num_saved
      if missing:
        saved = jax.tree.map(
          lambda first, rest: jnp.concatenate([first[None], rest]),
          operands.memories,
          saved,
        )
    return _tiles_backward(spec, layout, operands, saved, cotangents)

  d_operands = _evaluate(plan, run, (operands, saved, cotangents))
  return None, None, None, d_operands


_chunk.defvjp(_chunk_fwd, _chunk_bwd)


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
) -> tuple[types.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `api.chunk`."""
  if not spec.stale:
    # The exact recurrence has no chunks: a scan, checkpointed.
    return contract.scan(
      functools.partial(reference.step, spec=spec),
      state,
      inputs,
      segment_ids=segment_ids,
      reset_state=reset_state,
      block=_SCAN_BLOCK,
    )
  assert state.position is not None, "a stale Spec's state has a position"
  assert state.key_memory_start is not None
  assert state.value_memory_start is not None
  reset_state = state if reset_state is None else reset_state
  operands = _Operands(
    memories=(state.key_memory, state.value_memory),
    chunk_start=(state.key_memory_start, state.value_memory_start),
    reset=(reset_state.key_memory, reset_state.value_memory),
    inputs=inputs,
  )
  where = tiles.places(
    segment_ids,
    state.segment_id,
    state.position,
    time=inputs.query.shape[1],
    chunk=spec.chunk_size,
  )
  result = _chunk(spec, state.position, state.segment_id, segment_ids, operands)
  # Between two chunks the start is the memory itself.
  chunk_start = contract.batched_where(
    where.position == 0, result.memories, result.chunk_start
  )
  state = _state(result.memories, chunk_start, where.position, where.segment_id)
  return state, result.outputs


def _state(memories, chunk_start, position, segment_id) -> types.State:
  key_memory, value_memory = memories
  key_start, value_start = chunk_start
  return types.State(
    key_memory, value_memory, key_start, value_start, position, segment_id
  )
