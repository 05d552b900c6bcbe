"""The gates of a chunk, as the forward and the backward kernel use them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels.pallas_tpu import blocks
from memcomp_kernels.trellis.pallas_tpu import plan as layout


@dataclasses.dataclass(frozen=True)
class Gates:
  """The gates of one chunk and unit, for both passes.

  A pair of arrays has one array per pass. U are the scaled write directions.
  The kernels have two forms, "separable" and "safe"; see `plan.Plan.safe`.

  Attributes:
    plan: Plan of the kernel.
    log_decay: Cumulative log decay, a pair of `[1, lanes]`.
    write_rate: Write rates times -`activations.rate_scale`, a pair of `[1,
      lanes]`. The negative sign means that every write is added.
    eps: Epsilon of the activation phi.
    mu: exp(log_decay).
    inverse: Factor of U besides the write rate: 1 / mu if separable, None if
      safe.
    total: mu of the last token, a pair of `[1, width]`.
    to_end: Factor of U in the memory's update, a pair of `[1, lanes]`. It is
      None if separable, where `total` scales the whole sum.
    prev: Cumulative log decay before the token's own decay, a pair of `[1,
      lanes]`. Only for gradients per token, where `write_rate` is None.
  """

  plan: layout.Plan
  log_decay: layout.Pair
  write_rate: Any
  eps: Any
  mu: layout.Pair
  inverse: Any
  total: layout.Pair
  to_end: Any
  prev: Any = None

  @property
  def rate(self) -> layout.Pair:
    """The factor of U."""
    first, second = self.write_rate
    if self.inverse is None:
      return first, second
    return first * self.inverse[0], second * self.inverse[1]

  def read(self, start: jax.Array | None, rest: jax.Array) -> jax.Array:
    """Combines pass 1's reads, halved.

    Args:
      start: Read of the memory at the chunk's start; None if `rest` includes
        it.
      rest: Read of what the chunk wrote.
    """
    if start is None:
      return self.mu[0] * rest
    if self.plan.safe:
      return self.mu[0] * start + rest
    return self.mu[0] * (start + rest)

  def output(self, start: jax.Array | None, rest: jax.Array) -> jax.Array:
    """Combines pass 2's reads, `[tokens, width]`; arguments as in `read`."""
    if start is None:
      return rest
    return (self.mu_by_token() * start if self.plan.safe else start) + rest

  def omega(self, causal: jax.Array) -> tuple[Any, Any]:
    """Returns Omega, a pair of `[tokens, lanes]`; None if separable.

    The forward kernel computes it early and lets the matrix unit spread it.
    Both are faster there, because that kernel holds fewer arrays at a time.
    """
    if not self.plan.safe or self.plan.token:
      return None, None
    unit = self.plan.unit

    def between(row):
      column = blocks.by_token(row, unit.heads, unit.tokens)
      return jnp.exp(jnp.where(causal, column - row, -jnp.inf))

    first = between(self.log_decay[0])
    return first, first if self.plan.shared else between(self.log_decay[1])

  def weigh(
    self, p: int, scores: jax.Array, causal: jax.Array, omega: Any = None
  ) -> jax.Array:
    """Multiplies scores `[tokens, lanes]` with the decay between their tokens.

    Args:
      p: The pass.
      scores: Scores, `[tokens, lanes]`.
      causal: Causal mask, bool `[tokens, lanes]`.
      omega: Result of `omega` for the pass; None to compute it here.
    """
    if not self.plan.safe:
      return jnp.where(causal, scores, 0.0)
    return scores * (self.between(p, causal) if omega is None else omega)

  def weigh_transposed(
    self, p: int, scores: jax.Array, anticausal: jax.Array
  ) -> jax.Array:
    """Does what `weigh` does for scores whose rows are the written tokens."""
    if not self.plan.safe:
      return jnp.where(anticausal, scores, 0.0)
    unit, row = self.plan.unit, self.log_decay[p]
    column = blocks.spread(blocks.as_column(row), unit.heads, unit.tokens)
    return scores * jnp.exp(jnp.where(anticausal, row - column, -jnp.inf))

  def weigh_before(
    self, p: int, scores: jax.Array, strict: jax.Array, *, transposed: bool
  ) -> jax.Array:
    """Multiplies scores with the decay up to just before the later token.

    Args:
      p: The pass.
      scores: Scores, `[tokens, lanes]`.
      strict: Mask, bool `[tokens, lanes]`: the written token is before the
        other token.
      transposed: Whether rows are the written tokens.
    """
    unit = self.plan.unit
    row, column = self.log_decay[p], self.prev[p]
    if transposed:
      row, column = column, row
    column = blocks.spread(blocks.as_column(column), unit.heads, unit.tokens)
    log = row - column if transposed else column - row
    return scores * jnp.exp(jnp.where(strict, log, -jnp.inf))

  def between(self, p: int, causal: jax.Array) -> jax.Array:
    """Computes Omega `[tokens, lanes]`; it masks before exp."""
    unit, row = self.plan.unit, self.log_decay[p]
    column = blocks.spread(blocks.as_column(row), unit.heads, unit.tokens)
    return jnp.exp(jnp.where(causal, column - row, -jnp.inf))

  @property
  def code_scale(self) -> jax.Array | float:
    """Factor of the code; it includes 2, because memories are halved."""
    if self.plan.safe:
      return 2.0
    return 2.0 * self.mu[1]

  def mu_by_token(self) -> jax.Array:
    """Returns pass 2's mu, `[tokens, width]`."""
    unit, row = self.plan.unit, self.mu[1]
    if self.plan.token:  # here the vector unit spreads it
      return blocks.spread(blocks.as_column(row), unit.heads, unit.value_dim)
    return blocks.by_token(row, unit.heads, unit.value_dim)

  def advance(
    self, p: int, memory: jax.Array, u: jax.Array, written: jax.Array
  ) -> jax.Array:
    """Returns the memory after the chunk; `written` is block diagonal."""
    if self.to_end is not None:
      u = u * self.to_end[p]
      update = blocks.nn(u.astype(written.dtype), written)
      return self.total[p] * memory + update
    update = blocks.nn(u.astype(written.dtype), written)
    return self.total[p] * (memory + update)

  def sum_reads(self, first: jax.Array, second: jax.Array) -> layout.Pair:
    """Sums over slots; where gates are shared, both passes into one sum."""
    if self.plan.shared:
      return layout.sum_slots(first + second), 0.0
    return layout.sum_slots(first), layout.sum_slots(second)

  def sum_ends(self, kept: layout.Pair, update: layout.Pair) -> layout.Pair:
    """Returns the adjoint of the rows `end`.

    Args:
      kept: Memory before the chunk times the decayed adjoint of the memory
        after it, `[slots, width]`.
      update: U times its adjoint through the memory after the chunk, `[slots,
        lanes]`.
    """
    unit, plan = self.plan.unit, self.plan
    if plan.square:
      return self.sum_reads(kept[0] + update[0], kept[1] + update[1])
    lane = blocks.lane_in_head(unit.lanes, unit.heads)

    def end(kept, update):
      # Every lane of a head holds its end. The caller of the kernel sums their
      # adjoints.
      whole = blocks.sum_of_heads(
        layout.sum_slots(kept), unit.heads, unit.tokens
      )
      return jnp.where(lane == 0, whole, 0.0) + layout.sum_slots(update)

    return end(kept[0], update[0]), end(kept[1], update[1])

  def row_adjoints(
    self,
    d_reads: layout.Pair,
    d_rate: layout.Pair,
    d_eps: layout.Pair,
    d_ends: layout.Pair,
  ) -> jax.Array:
    """Returns the adjoint of the rows.

    Args:
      d_reads: Result of `sum_reads`.
      d_rate: Adjoint of the scaled rates, `[1, lanes]`; not read if rates are
        rows by lane.
      d_eps: Adjoint of eps, `[1, lanes]`; not read unless eps is a row.
      d_ends: Result of `sum_ends`.
    """
    plan = self.plan
    if plan.token:
      return self._token_row_adjoints(d_reads, d_ends)
    log_decay = [-d * rate for d, rate in zip(d_rate, self.rate, strict=True)]
    if self.inverse is not None:
      d_rate = tuple(d * x for d, x in zip(d_rate, self.inverse, strict=True))
    rows = {"log": log_decay, "rate": d_rate}
    named = {
      f"{name}{p}": x for name, pair in rows.items() for p, x in enumerate(pair)
    }
    for p in (0, 1):
      named[f"log{p}"] += d_reads[p]
      named[f"end{p}"] = d_ends[p]
    if plan.shared:
      for name in ("log", "rate", "end"):
        named[f"{name}0"] += named[f"{name}1"]
    if plan.phi_eps is None:
      named["eps"] = d_eps[0] + d_eps[1]
    none = jnp.zeros_like(d_rate[0])
    return jnp.concatenate([named.get(n, none) for n in plan.row_names], 0)

  def _token_row_adjoints(
    self, d_reads: layout.Pair, d_ends: layout.Pair
  ) -> jax.Array:
    """Returns the adjoint of the rows by unit, for gradients per token."""
    plan = self.plan
    named = {f"log{p}": x for p, x in enumerate(d_reads)}
    named |= {f"end{p}": x for p, x in enumerate(d_ends)}
    if plan.shared:
      for name in ("log", "end"):
        named[f"{name}0"] += named[f"{name}1"]
    none = jnp.zeros_like(named["log0"])
    return jnp.concatenate([named.get(n, none) for n in plan.row_names], 0)


def gates(rows: jax.Array, plan: layout.Plan) -> Gates:
  """Computes the gates of a chunk from its rows."""
  unit = plan.unit
  at = {name: i for i, name in enumerate(plan.row_names)}

  def pair(name, function=lambda row: row):
    first = function(rows[at[f"{name}0"] : at[f"{name}0"] + 1])
    if plan.shared:
      return first, first
    return first, function(rows[at[f"{name}1"] : at[f"{name}1"] + 1])

  log_decay, end = pair("log"), pair("end")
  total = tuple(
    jnp.exp(row if plan.square else blocks.first_of_heads(row, unit.heads, dim))
    for row, dim in zip(end, unit.dims, strict=True)
  )
  if plan.shared and plan.square:
    total = total[0], total[0]
  to_end = None
  if plan.safe:
    to_end = tuple(
      jnp.exp(last - row) for last, row in zip(end, log_decay, strict=True)
    )
  return Gates(
    plan=plan,
    log_decay=log_decay,
    write_rate=None if plan.token else pair("rate"),
    eps=rows[at["eps"] : at["eps"] + 1] if "eps" in at else plan.phi_eps,
    mu=pair("log", jnp.exp),
    inverse=None if plan.safe else pair("log", lambda row: jnp.exp(-row)),
    total=total,
    to_end=to_end,
    prev=pair("prev") if plan.token else None,
  )
