"""What all sequence mixers share: their configuration and their context.

  Module(config, d_model, std=, out_std=, rngs=)
  init_state(batch, length=None) -> state
  module(x, state, context) -> (y, state)     x is [batch, time, d_model]
  step(x, state, context) -> (y, state)       x is [batch, d_model]
  memories(state) -> arrays

A state holds the memory of sequences of `length` tokens; a memory of constant
size ignores it. A mixer whose configuration has `value_residual` also has
`value_of(x)`; one whose state has `stats` keeps there how the tiles of the last
call were solved.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax

from memcomp_kernels.primitives import triangular


class Context(NamedTuple):
  """What a mixer is told beside its input and its state.

  Attributes:
    segment_ids: int32 `[batch, time]`, 0 is padding; None for one segment.
    first_value: `[batch, time, width]`, the values of the first layer of this
      kind at the embeddings, for value residuals; None without.
    noise: PRNG key for what is random in training; None for nothing random.
    seen: upper bound, known when the program is made, of the tokens that any
      row has seen before this call; 0 with fresh states, None if not known.
      It never changes a result: a growing memory computes with fewer rows.
  """

  segment_ids: jax.Array | None = None
  first_value: jax.Array | None = None
  noise: jax.Array | None = None
  seen: int | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class MixerConfig(abc.ABC):
  """A sequence mixer's configuration; each mixer adds its fields."""

  @property
  def random(self) -> bool:
    """Whether training it uses `Context.noise`."""
    return False

  @abc.abstractmethod
  def spec(self) -> Any:
    """The meaning of the memory, see the kernel's `Spec`.

    Raises:
      ValueError: naming the field that is out of range.
    """

  @abc.abstractmethod
  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""

  @abc.abstractmethod
  def state_floats(self, length: int) -> int:
    """Floats of the memory after `length` tokens of a sequence, one layer.

    What reads need between two chunks: inside of one, some states also hold a
    copy of its start.
    """

  @abc.abstractmethod
  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, one layer.

    The mean over a sequence of `length` tokens; multiply-adds count two.
    """


SOLVERS = ("auto", *triangular.METHODS)


@dataclasses.dataclass(kw_only=True, slots=True)
class SolverConfig:
  """How gradients per token are evaluated: speed, never meaning.

  Attributes:
    method: "substitution", exact by construction; "sweeps", until nothing
      moves, else substitution: then `sweeps`, `residual` and `unreached` join
      the training metrics; "auto" is the fastest exact one of the platform.
    tile_time: tokens that are solved together; 0 is the default.
    tolerance: of sweeps, in float32.
  """

  method: str = "auto"
  tile_time: int = 0
  tolerance: float = 1e-6

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    if self.method not in SOLVERS:
      raise ValueError(
        f"solver.method={self.method!r} is not one of: {', '.join(SOLVERS)}"
      )
    for name in ("tile_time", "tolerance"):
      if not getattr(self, name) >= 0:
        value = getattr(self, name)
        raise ValueError(f"solver.{name}={value} must not be negative")

  def stats(self, gradient_at: str) -> bool:
    """Whether there is something to tell of each call."""
    return self.method == "sweeps" and gradient_at == "token"


def require_positive(config: Any, *names: str) -> None:
  """Raises ValueError naming the first field that is not at least 1."""
  for name in names:
    if getattr(config, name) < 1:
      raise ValueError(f"{name}={getattr(config, name)} must be at least 1")
