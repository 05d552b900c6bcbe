"""What the checks of the contract look at, and what they compare."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels.testing import errors, gradients, tolerances
from memcomp_kernels.testing import memory as memory_lib

SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}


@dataclasses.dataclass(frozen=True)
class Subject:
  """What is checked: one implementation of one memory with one Spec.

  Attributes:
    memory: the memory under test.
    spec: its options.
    implementation: name of the implementation of its chunk function.
    sizes: sizes of inputs and states.
    keep: whether later checks reuse what one check compiled. It must be False
      if the code changes in between.
  """

  memory: memory_lib.Memory
  spec: Any
  implementation: str
  sizes: tuple[tuple[str, int], ...] = tuple(SIZES.items())
  keep: bool = False

  def inputs(self, time: int, seed: int = 0, **changes) -> Any:
    """Returns random inputs, in the widest dtype that is switched on."""
    sizes = dict(self.sizes) | {"time": time} | changes
    return self._drawn(self.memory.make_inputs, seed, sizes)

  def state(self, seed: int = 1, **changes) -> Any:
    """Returns a state before the first token, with random memories."""
    sizes = dict(self.sizes) | changes
    return self._drawn(self.memory.make_state, seed, sizes)

  def _drawn(self, make: Callable, seed: int, sizes: dict[str, int]) -> Any:
    # Code that changes in between must not be in another's program.
    program = _drawing if self.keep else _drawing.__wrapped__
    made = program(make, self.spec, tuple(sizes.items()))
    return made(jax.random.key(seed))

  def chunk(self, state, inputs, segment_ids=None, reset_state=None):
    """Runs the implementation under test."""
    return self.memory.op.chunk(
      state,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=reset_state,
      implementation=self.implementation,
    )

  def reference(self, state, inputs, segment_ids=None, reset_state=None):
    """Runs the definition."""
    return self.memory.op.reference(
      state,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=reset_state,
    )

  def step(self, state, inputs):
    """Runs one token."""
    return self.memory.op.step(state, inputs, spec=self.spec)


@functools.lru_cache(maxsize=64)
def _drawing(make: Callable, spec: Any, sizes: tuple) -> Callable:
  """Returns a program that draws inputs or a state from a key."""
  return jax.jit(lambda key: make(key, spec, **dict(sizes)))


_TOKENS = 48
"""Tokens per row in `packed_checks`, whose program `_after` shares."""


def _after(subject: Subject, seen: np.ndarray, seeds: tuple[int, int]) -> Any:
  """Returns the state of each row after as many tokens as `seen` says."""
  batch = len(seen)
  state = subject.state(seed=seeds[0], batch=batch)
  inputs = subject.inputs(_TOKENS, seeds[1], batch=batch)
  ids = np.arange(_TOKENS) < seen[:, None]
  run = gradients.compiled(subject.reference)
  return run(state, inputs, jnp.asarray(ids, jnp.int32), state)[0]


def states_inside(subject: Subject, batch: int) -> Any:
  """Returns states at different places in a chunk; the first one is fresh."""
  # The third state is beyond a first chunk of 16 tokens.
  seen = np.random.default_rng(11).integers(1, 40, batch)
  seen[:3] = (0, 3, 21)[:batch]
  return _after(subject, seen, (5, 6))


def assert_agree(
  actual: tuple[Any, Any],
  expected: tuple[Any, Any],
  what: str,
  dtype: str = "float64",
) -> None:
  """Asserts that two results of `value_and_gradients` agree.

  Raises:
    AssertionError: they differ; the message says which part, and by how much.
  """
  bounds = tolerances.VALUE[dtype], tolerances.GRADIENT[dtype]
  for a, b, bound, part in zip(
    actual, expected, bounds, ("values", "gradients"), strict=True
  ):
    errors.assert_close(a, b, bound, f"{what}: {part}")


def continued(subject: Subject, batch: int) -> Any:
  """Returns a state some tokens after the state of `Subject.state`."""
  return _after(subject, np.full(batch, 3), (3, 4))


def cut_time(tree: Any, pieces: int) -> Any:
  """Cuts `[batch, time, ...]` into `[pieces, batch, time / pieces, ...]`."""

  def cut(x):
    x = x.reshape(x.shape[0], pieces, -1, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  return jax.tree.map(cut, tree)


def join_time(outputs: jax.Array) -> jax.Array:
  """Undoes `cut_time` for one array."""
  outputs = jnp.moveaxis(outputs, 0, 1)
  return outputs.reshape(len(outputs), -1, *outputs.shape[3:])
