"""The gates of a chunk, as the forward and the backward kernel use them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from memcomp_kernels.pallas_tpu import blocks
from memcomp_kernels.trellis.pallas_tpu import plan as plan_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gates:
  """The gates of one chunk and unit, for both passes.

  A pair of arrays has one array per pass. U are the scaled write directions.
  The kernels have two forms, "separable" and "safe"; see `plan.Plan.safe`.

  Attributes:
    plan: Plan of the kernel.
    log_decay: Cumulative log decay, a pair of `[1, lanes]`.
    mu: exp(log_decay).
    inverse: Factor of U besides the write rate: 1 / mu if separable, None if
      safe.
    total: mu of the last token, a pair of `[1, width]`.
    to_end: Factor of U in the memory's update, a pair of `[1, lanes]`. It is
      None if separable, where `total` scales the whole sum.
  """

  plan: plan_lib.Plan
  log_decay: plan_lib.Pair
  mu: plan_lib.Pair
  inverse: Any
  total: plan_lib.Pair
  to_end: Any

  @classmethod
  def of(cls, rows: jax.Array, plan: Any) -> Self:
    """Computes the gates of a chunk from its rows."""
    unit = plan.unit
    at = {name: i for i, name in enumerate(plan.row_names)}

    def row(name):
      return rows[at[name] : at[name] + 1]

    def pair(name, function=lambda row: row):
      first = function(row(f"{name}0"))
      return first, first if plan.shared else function(row(f"{name}1"))

    log_decay, end = pair("log"), pair("end")
    total = tuple(
      jnp.exp(
        row if plan.square else blocks.first_of_heads(row, unit.heads, dim)
      )
      for row, dim in zip(end, unit.dims, strict=True)
    )
    if plan.shared and plan.square:
      total = total[0], total[0]
    to_end = None
    if plan.safe:
      to_end = tuple(
        jnp.exp(last - row) for last, row in zip(end, log_decay, strict=True)
      )
    return cls(
      plan=plan,
      log_decay=log_decay,
      total=total,
      to_end=to_end,
      **cls.more(plan, row, pair),
      mu=pair("log", jnp.exp),
      inverse=None if plan.safe else pair("log", lambda row: jnp.exp(-row)),
    )

  @staticmethod
  def more(plan: Any, row: Callable, pair: Callable) -> dict[str, Any]:
    """Returns what a kind of plan adds, from `row(name)` and `pair(name)`."""
    raise NotImplementedError

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
    """Returns Omega for the forward kernel's `weigh`; None to compute it there.

    It is a pair of `[tokens, lanes]`.
    """
    del causal
    return None, None

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
    raise NotImplementedError

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

  def sum_reads(self, first: jax.Array, second: jax.Array) -> plan_lib.Pair:
    """Sums over slots; where gates are shared, both passes into one sum."""
    if self.plan.shared:
      return plan_lib.sum_slots(first + second), 0.0
    return plan_lib.sum_slots(first), plan_lib.sum_slots(second)

  def sum_ends(
    self, kept: plan_lib.Pair, update: plan_lib.Pair
  ) -> plan_lib.Pair:
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
        plan_lib.sum_slots(kept), unit.heads, unit.tokens
      )
      return jnp.where(lane == 0, whole, 0.0) + plan_lib.sum_slots(update)

    return end(kept[0], update[0]), end(kept[1], update[1])
