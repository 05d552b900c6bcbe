"""What the checks of the contract look at, and what they compare."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels.testing import errors, tolerances
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
    sizes = dict(self.sizes) | changes
    return self.memory.make_inputs(
      jax.random.key(seed), self.spec, time=time, **sizes
    )

  def state(self, seed: int = 1, **changes) -> Any:
    """Returns a state before the first token, with random memories."""
    sizes = dict(self.sizes) | changes
    return self.memory.make_state(jax.random.key(seed), self.spec, **sizes)

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


def states_inside(subject: Subject, batch: int) -> Any:
  """Returns states at different places in a chunk; the first one is fresh."""
  # The third state is beyond a first chunk of 16 tokens.
  seen = np.random.default_rng(11).integers(1, 40, batch)
  seen[:3] = (0, 3, 21)[:batch]
  inputs = subject.inputs(int(seen.max()), 6, batch=batch)
  ids = np.arange(seen.max()) < seen[:, None]
  state = subject.state(seed=5, batch=batch)
  found, _ = subject.reference(
    state, inputs, jnp.asarray(ids, jnp.int32), state
  )
  return found


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
  state, inputs = (
    subject.state(seed=3, batch=batch),
    subject.inputs(3, 4, batch=batch),
  )
  return subject.reference(state, inputs)[0]


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
