"""The algebra of one tile of Tensor Cache's memory, as matrix products.

Rows are tokens. All rules and all orders of reads and writes share one algebra.
They differ in which writes a row sees. Count boundaries 0..C between the tile's
C tokens. With a_j the decay of token j (1 if it writes nothing),

  E_{b,j} = prod_{j <= i < b} a_i      the share at b of what there was at j

so at boundary b the memory is E_{b,0} A + sum_{i < b} E_{b,i+1} g_i k_i (x) u_i
and row r, which sees boundary b(r), reads

  y_r = E_{b(r),0} q_r A + sum_i E_{b(r),i+1} g_i (q_r . k_i) u_i.

  "evicted"   b(r) = r before, r + 1 after the write
  "all"       b(r) = the start of r's chunk. If that is before the tile, r reads
              the memory carried from there, with a share of 1
  delta       u_r = v_r - k_r A_{b(r)}: the triangular system of
              `math.delta` (u of (3) and (14) is known)
  a segment   that starts in the tile at token o has E_{b,o} and the state it
              starts from in place of E_{b,0} and A, and only its own writes

Slots and timescales are lanes n, each with its own E. Keys are shared, so there
is one product of scores, and reads sum over lanes inside products. Decays of
slots are multiplied, and not added as logs, because 1 + rho (lambda - 1) may be
0, where its log has no gradient.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.math import decay, delta
from memcomp_kernels.tensor_cache import reference

# Work within a tile grows with its length, work between tiles falls with it.
# The delta rule also solves a triangular system per tile.
_TOKENS = {"outer": 64, "wedge": 64, "delta": 32}


def tile_time(spec: reference.Spec, time: int) -> int:
  """Returns tokens per tile, for a call of `time` tokens; it changes speed."""
  return min(_TOKENS[spec.rule], time)


class Roles(NamedTuple):
  """What the tokens of a tile do, `[batch, tile]`.

  Attributes:
    writes: bool, whether the token writes.
    starts: bool, whether a new segment starts there; None if none can.
    phase: int32, number of tokens before it in its chunk; None without chunks,
      -1 at padding.
  """

  writes: jax.Array
  starts: jax.Array | None
  phase: jax.Array | None


class Carry(NamedTuple):
  """What is carried from tile to tile; see `reference.State`.

  With `chunk_mean`, `memories` hold the complete chunks and also serve as
  `starts`.
  """

  memories: reference.Memories
  starts: reference.Memories | None
  sums: reference.Sums | None


class _Seen(NamedTuple):
  """What rows see.

  Attributes:
    base: `[batch, heads, lanes, rows]`, the share of the base memory.
    writes: `[batch, heads, lanes, rows, tile]`, the share of each write.
    bases: pairs of a memory and the rows that start from it, bool `[batch,
      rows]`.
  """

  base: jax.Array
  writes: jax.Array
  bases: list[tuple[reference.Memories, jax.Array]]


def run(
  carry: Carry,
  reset: Carry,
  tokens: reference.Inputs,
  roles: Roles,
  spec: reference.Spec,
) -> tuple[Carry, jax.Array]:
  """Reads and writes one tile.

  Args:
    carry: the carry before the tile.
    reset: the carry that a new segment starts from.
    tokens: tokens of the tile.
    roles: what the tokens do.
    spec: the memory's options.

  Returns:
    The carry after the tile, and reads `[batch, heads, tile, value]` in the
    query's dtype.
  """
  dtype = tokens.query.dtype
  dot = functools.partial(contract.product, dtype=dtype)
  origin = _latest(roles.starts)
  begin = _latest(None if roles.phase is None else roles.phase == 0)
  sums = None
  if spec.chunk_mean:
    tokens, roles, sums = _chunk_means(
      carry.sums, reset.sums, tokens, roles, origin, begin, spec, dot
    )
    begin = None  # a chunk is written at its end, so all its reads agree
  tokens = masked(tokens, roles.writes[:, None, :, None])
  survived, rate = survival(tokens)

  def seen(shares, boundary):
    return _seen(carry, reset, shares, boundary, origin)

  if begin is None:
    time = roles.writes.shape[1]
    before = seen(survived[..., :-1, :], jnp.arange(time)[None])
    read = before
    if spec.read_after_write:
      read = seen(survived[..., 1:, :], 1 + jnp.arange(time)[None])
  else:
    before = read = seen(_rows(survived, begin), begin)

  # u, [batch, heads, lanes or 1, tile, value].
  u = tokens.value[:, :, None]
  if spec.rule == "delta":
    u = prediction_errors(tokens, before, rate, dot)

  weights = jnp.moveaxis(read_weights(tokens), -1, 2)
  shares = read.writes * rate[..., None, :]
  scores = dot("bhrk,bhik->bhri", tokens.query, tokens.key)[:, :, None]
  if spec.read_norm:
    weights /= _normalizer(tokens.query, read, shares * scores)
  rows = (weights * read.base)[..., None] * tokens.query[:, :, None]
  output = _from_base("bhnrk,bhnkv->bhrv", rows, read, dot)
  shares *= weights[..., None]
  if u.shape[2] == 1:
    shares = jnp.sum(shares, axis=2, keepdims=True)
  output += dot("bhnri,bhniv->bhrv", shares * scores, u)
  if spec.rule == "wedge":
    scores = dot("bhrk,bhik->bhri", tokens.query, tokens.value)[:, :, None]
    output -= dot("bhri,bhik->bhrk", (shares * scores)[:, :, 0], tokens.key)

  def memories_at(shares, boundary):
    last = None if origin is None else origin[:, -1:]
    return _memories(
      _seen(carry, reset, shares, boundary, last), rate, tokens, u, spec, dot
    )

  time = survived.shape[-1] - 1
  memories = memories_at(survived[..., -1:, :], jnp.full((1, 1), time))
  starts = None
  if begin is not None:
    starts = memories_at(_rows(survived, begin[:, -1:]), begin[:, -1:])
  return Carry(memories, starts, sums), output.astype(dtype)


def masked(tokens: reference.Inputs, writes: jax.Array) -> reference.Inputs:
  """Sets gates to zero unless the token writes; bool with axes of the gates."""
  return tokens._replace(
    log_decay=jnp.where(writes, tokens.log_decay, 0),
    write_rate=jnp.where(writes, tokens.write_rate, 0),
  )


def _latest(flags: jax.Array | None) -> jax.Array | None:
  """Returns the latest true place at or before each, or -1; `[batch, tile]`."""
  if flags is None:
    return None
  index = jnp.where(flags, jnp.arange(flags.shape[1]), -1)
  return lax.cummax(index, axis=1)


def _rows(survival: jax.Array, boundary: jax.Array) -> jax.Array:
  index = jnp.maximum(boundary, 0)[:, None, None, :, None]
  return jnp.take_along_axis(survival, index, axis=-2)


def _lanes(x: jax.Array) -> jax.Array:
  """Maps `[batch, heads, tile, timescales, slots]` to `[..., n, tile]`."""
  return jnp.moveaxis(x.reshape(*x.shape[:3], -1), -1, 2)


def gates(tokens: reference.Inputs) -> tuple[jax.Array, jax.Array]:
  """Returns a and g, each `[batch, heads, lanes, tile]`."""
  factor, rate = jnp.exp(tokens.log_decay)[..., None], tokens.write_rate
  rate = rate[..., None]
  if tokens.write_route is not None:
    route = tokens.write_route[..., None, :]
    factor = 1 + route * jnp.expm1(tokens.log_decay)[..., None]
    rate = rate * route
  return _lanes(factor), _lanes(rate)


def survival(tokens: reference.Inputs) -> tuple[jax.Array, jax.Array]:
  """Returns E `[..., lanes, C + 1, C + 1]`, and g `[..., lanes, C]`.

  Args:
    tokens: tokens whose gates are zero if they write nothing.
  """
  factor, rate = gates(tokens)
  time = factor.shape[-1]
  kept = jnp.tril(jnp.ones((time + 1, time + 1), bool))
  start = [(0, 0)] * 3 + [(1, 0)]
  if tokens.write_route is None:
    sums = decay.running_sums(_lanes(tokens.log_decay[..., None]))
    sums = jax.tree.map(lambda x: jnp.pad(x, start), sums)
    difference = decay.pairs(sums, sums)
    # Mask the exponent as well as the result, or its gradient is nan.
    shares = jnp.exp(jnp.where(kept, difference, 0))
  else:
    factor = jnp.pad(factor, start, constant_values=1)
    strict = jnp.tril(kept, -1)
    shares = jnp.where(strict, factor[..., :, None], 1)
    shares = lax.associative_scan(jnp.multiply, shares, axis=-2)
  return jnp.where(kept, shares, 0), rate


def _seen(carry, reset, shares, boundary, origin) -> _Seen:
  """Returns what rows see at `boundary` `[batch, rows]`; -1 if before."""
  write = jnp.arange(shares.shape[-1] - 1)
  visible = write < boundary[..., None]
  if origin is None:
    base = shares[..., 0]
    here = boundary >= 0
    bases = [(carry.memories, here), (carry.starts, ~here)]
  else:
    visible &= write >= origin[..., None]
    own = jnp.arange(shares.shape[-1]) == jnp.maximum(origin, 0)[..., None]
    base = jnp.sum(jnp.where(own[:, None, None], shares, 0), axis=-1)
    fresh, here = origin >= 0, boundary >= jnp.maximum(origin, 0)
    bases = [
      (carry.memories, here & ~fresh),
      (carry.starts, ~here & ~fresh),
      (reset.memories, here & fresh),
      (reset.starts, ~here & fresh),
    ]
  base = jnp.where(here[:, None, None], base, 1)
  writes = jnp.where(visible[:, None, None], shares[..., 1:], 0)
  # Without chunks, no row sees a boundary before the tile, so starts are None.
  bases = [pair for pair in bases if pair[0] is not None]
  return _Seen(base, writes, bases)


def _from_base(equation, rows, seen: _Seen, dot) -> jax.Array:
  """Multiplies rows with the memory that each starts from."""
  total = jnp.zeros((), seen.base.dtype)
  for memories, own in seen.bases:
    own = own[:, None, None, :, None]
    total += dot(equation, jnp.where(own, rows, 0), memories.memory)
  return total


def prediction_errors(
  tokens: reference.Inputs, before: _Seen, rate, dot
) -> jax.Array:
  """Returns the delta rule's writes, `[batch, heads, lanes, tile, value]`."""
  coupling = dot("bhrk,bhik->bhri", tokens.key, tokens.key)[:, :, None]
  coupling *= before.writes * rate[..., None, :]
  rows = tokens.key[:, :, None] * before.base[..., None]
  predicted = _from_base("bhnrk,bhnkv->bhnrv", rows, before, dot)
  return delta.solve(coupling, tokens.value[:, :, None] - predicted)


def read_weights(tokens: reference.Inputs) -> jax.Array:
  """Returns products of pi and alpha, with lanes last for timescales."""
  slots = tokens.read_route
  fast = jnp.ones_like(tokens.log_decay[..., :1])
  mix = fast
  if tokens.read_mix is not None:
    mix = jnp.concatenate([fast, tokens.read_mix], axis=-1)
  slots = fast if slots is None else slots
  weights = mix[..., :, None] * slots[..., None, :]
  return weights.reshape(*weights.shape[:-2], -1)


def _normalizer(query, read: _Seen, along: jax.Array) -> jax.Array:
  """Returns max(|q . z|, 1) per lane; `along` has scores, shares and rates."""
  base = 0
  for memories, own in read.bases:
    part = jnp.einsum(
      "bhrk,bhnk->bhnr",
      query.astype(read.base.dtype),
      memories.normalizer,
      precision=lax.Precision.HIGHEST,
    )
    base += jnp.where(own[:, None, None], part, 0)
  z = read.base * base + jnp.sum(along, axis=-1)
  return jnp.maximum(jnp.abs(z), 1)


def _memories(seen: _Seen, rate, tokens, u, spec, dot) -> reference.Memories:
  """Returns the memories that one row sees."""
  base = seen.bases[0][0]
  for memories, own in seen.bases[1:]:
    base = contract.batched_where(
      jnp.broadcast_to(own[:, 0], base.memory.shape[:1]), memories, base
    )
  share = seen.base[..., 0]
  written = seen.writes[..., 0, :] * rate
  memory = dot("bhik,bhniv->bhnkv", tokens.key, written[..., None] * u)
  if spec.rule == "wedge":
    memory -= jnp.swapaxes(memory, -1, -2)
  memory += share[..., None, None] * base.memory
  normalizer = None
  if base.normalizer is not None:
    normalizer = dot("bhni,bhik->bhnk", written, tokens.key)
    normalizer += share[..., None] * base.normalizer
  return reference.Memories(memory, normalizer)


def _chunk_means(sums, reset_sums, tokens, roles, origin, begin, spec, dot):
  """Writes (6) at each chunk's last token; also returns the sums at the end."""
  place = jnp.arange(roles.writes.shape[1])
  member = (place <= place[:, None]) & (place >= begin[..., None])
  member &= roles.writes[:, None, :]
  carried = begin < 0
  if origin is not None:
    member &= place >= origin[..., None]
    carried &= origin < 0
    inherited = begin < origin

  def total(x, before, reset_before):
    result = dot("bri,bhik->bhrk", member, x)
    result += jnp.where(carried[:, None, :, None], before[:, :, None], 0)
    if origin is not None:
      result += jnp.where(
        inherited[:, None, :, None], reset_before[:, :, None], 0
      )
    return result

  key = total(tokens.key, sums.key, reset_sums.key)
  value = total(tokens.value, sums.value, reset_sums.value)
  tokens = tokens._replace(
    key=key / spec.chunk_size, value=value / spec.chunk_size
  )
  roles = roles._replace(writes=roles.phase == spec.chunk_size - 1)
  return tokens, roles, reference.Sums(key[:, :, -1], value[:, :, -1])
