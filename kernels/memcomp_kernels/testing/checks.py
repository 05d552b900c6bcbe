"""The contract, as checks of one memory, Spec and implementation.

Each check raises AssertionError where a promise of `contract` is broken. The
truth is the reference in float64; `jax.enable_x64` is switched inside.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels.testing import errors, tolerances
from memcomp_kernels.testing import memory as memory_lib

SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}


@dataclasses.dataclass(frozen=True)
class Subject:
  """What is checked: one implementation of one memory under one Spec."""

  memory: memory_lib.Memory
  spec: Any
  implementation: str
  sizes: tuple[tuple[str, int], ...] = tuple(SIZES.items())

  def inputs(self, time: int, seed: int = 0, **changes) -> Any:
    """Random inputs, in the widest dtype that is switched on."""
    sizes = dict(self.sizes) | changes
    return self.memory.make_inputs(
      jax.random.key(seed), self.spec, time=time, **sizes
    )

  def state(self, seed: int = 1, **changes) -> Any:
    """A state before the first token, with random memories."""
    sizes = dict(self.sizes) | changes
    return self.memory.make_state(jax.random.key(seed), self.spec, **sizes)

  def chunk(self, state, inputs, segment_ids=None, reset_state=None):
    """The implementation under test."""
    return self.memory.api.chunk(
      state,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=reset_state,
      implementation=self.implementation,
    )

  def reference(self, state, inputs, segment_ids=None, reset_state=None):
    """The definition."""
    return self.memory.api.reference(
      state,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=reset_state,
    )

  def step(self, state, inputs):
    """One token."""
    return self.memory.api.step(state, inputs, spec=self.spec)


def cast(tree: Any, dtype: Any) -> Any:
  """Casts the floating leaves of a tree."""
  return jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, tree)


def value_and_gradients(
  function: Callable, arguments: tuple, seed: int = 9
) -> tuple[Any, Any]:
  """Returns function(*arguments), and gradients of <cotangents, it>.

  With respect to every floating leaf of the arguments (zero for the others);
  random cotangents cover every floating leaf of the result, the final state's
  included.
  """
  leaves, tree = jax.tree.flatten(arguments)
  floats = [x for x in leaves if _is_float(x)]
  outputs = jax.tree.leaves(jax.eval_shape(function, *arguments))
  # Drawn by numpy, outside any compiled function, so that every function, mode
  # and precision is asked for the same derivative.
  rng = np.random.default_rng(seed)
  cotangents = [
    rng.standard_normal(x.shape).astype(np.float32)
    for x in outputs
    if _is_float(x)
  ]

  def objective(floats):
    replaced = iter(floats)
    filled = [next(replaced) if _is_float(x) else x for x in leaves]
    result = function(*jax.tree.unflatten(tree, filled))
    outputs = [x for x in jax.tree.leaves(result) if _is_float(x)]
    total = 0.0
    for c, x in zip(cotangents, outputs, strict=True):
      wide = jnp.promote_types(x.dtype, jnp.float32)
      total = total + jnp.sum(jnp.asarray(c, wide) * x.astype(wide))
    return total, result

  found, result = jax.jit(jax.grad(objective, has_aux=True))(floats)
  found = iter(found)
  filled = [next(found) if _is_float(x) else jnp.zeros(()) for x in leaves]
  return result, jax.tree.unflatten(tree, filled)


def assert_agree(
  actual: tuple[Any, Any],
  expected: tuple[Any, Any],
  what: str,
  dtype: str = "float64",
) -> None:
  """Asserts that two results of `value_and_gradients` agree.

  Raises:
    AssertionError: naming what is off, and by how much.
  """
  bounds = tolerances.VALUE[dtype], tolerances.GRADIENT[dtype]
  for a, b, bound, part in zip(
    actual, expected, bounds, ("values", "gradients"), strict=True
  ):
    errors.assert_close(a, b, bound, f"{what}: {part}")


def check_truth(subject: Subject, time: int) -> None:
  """Levels 2 and 5: float64 values and gradients equal the reference's."""
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(time)
    assert_agree(
      value_and_gradients(subject.chunk, arguments),
      value_and_gradients(subject.reference, arguments),
      f"time {time}",
    )


def check_values(subject: Subject, time: int) -> None:
  """Level 2: float64 outputs and final state equal the reference's."""
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(time)
    errors.assert_close(
      jax.jit(subject.chunk)(*arguments),
      jax.jit(subject.reference)(*arguments),
      tolerances.VALUE["float64"],
      f"values, time {time}",
    )


def check_finite_differences(subject: Subject, time: int) -> None:
  """Level 5: the reference's gradients are derivatives, in float64.

  By central differences along a random direction of all arguments.
  """
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(time)
    _, gradient = value_and_gradients(subject.reference, arguments)
    rng = np.random.default_rng(5)
    direction = jax.tree.map(
      lambda x: rng.standard_normal(x.shape) if _is_float(x) else 0, arguments
    )

    def moved(scale):
      return jax.tree.map(
        lambda x, d: x + scale * d if _is_float(x) else x, arguments, direction
      )

    # The same cotangents as above, applied to the result.
    function, h = jax.jit(subject.reference), 1e-5
    rng = np.random.default_rng(9)
    outputs = [
      [x for x in jax.tree.leaves(function(*moved(sign * h))) if _is_float(x)]
      for sign in (1, -1)
    ]
    numeric = sum(
      jnp.sum(rng.standard_normal(a.shape).astype(np.float32) * (a - b))
      for a, b in zip(*outputs, strict=True)
    ) / (2 * h)
    analytic = sum(
      jnp.sum(g * d)
      for g, d in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True
      )
    )
    errors.assert_close(
      analytic, numeric, tolerances.FINITE_DIFFERENCE, "finite differences"
    )


def check_precision(subject: Subject, dtype: str, time: int) -> None:
  """Levels 3 and 5: what rounding loses, inputs rounded first."""
  with jax.enable_x64(True):
    state = cast(subject.state(), jnp.float32)
    inputs = cast(subject.inputs(time), dtype)
    # Gates are float32 in every run: a bfloat16 log decay of -0.02 is off by
    # more than anything the memory does.
    inputs = _with_wide_gates(inputs, subject.inputs(time), jnp.float32)
    exact = cast((state, inputs), jnp.float64)
    expected = value_and_gradients(subject.reference, exact)
  results = value_and_gradients(subject.chunk, (state, inputs))
  got_state, got = results[0]
  if got.dtype != inputs.query.dtype:
    raise AssertionError(f"output is {got.dtype}, not the query's dtype")
  for leaf in jax.tree.leaves(got_state):
    if _is_float(leaf) and leaf.dtype != jnp.float32:
      raise AssertionError(f"a state is {leaf.dtype}, not float32")
  assert_agree(results, expected, dtype, dtype)


def check_hand_off(subject: Subject, piece: int, pieces: int) -> None:
  """Level 6: pieces with the state passed on equal one call, as do steps.

  With `piece` and the chunk size coprime, every offset into a chunk is met.
  Values and gradients (through every hand-off).
  """
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(piece * pieces)

    def in_pieces(state, inputs):
      def body(state, inputs):
        return subject.chunk(state, inputs)

      cut = jax.tree.map(
        lambda x: jnp.moveaxis(
          x.reshape(x.shape[0], pieces, piece, *x.shape[2:]), 1, 0
        ),
        inputs,
      )
      state, outputs = jax.lax.scan(body, state, cut)
      outputs = jnp.moveaxis(outputs, 0, 1)
      return state, outputs.reshape(
        outputs.shape[0], piece * pieces, *outputs.shape[3:]
      )

    def by_step(state, inputs):
      by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
      state, outputs = jax.lax.scan(subject.step, state, by_time)
      return state, jnp.moveaxis(outputs, 0, 1)

    whole = value_and_gradients(subject.chunk, arguments)
    for name, function in (("pieces", in_pieces), ("steps", by_step)):
      assert_agree(value_and_gradients(function, arguments), whole, name)


def check_packing(subject: Subject, lengths: list[int], padding: int) -> None:
  """Level 7: a packed row equals its segments alone, forward and backward.

  Args:
    subject: what is checked.
    lengths: of the segments in the row.
    padding: tokens of padding before, between and after the segments.
  """
  with jax.enable_x64(True):
    state = subject.state(batch=1)
    parts = [
      subject.inputs(length, seed=i, batch=1)
      for i, length in enumerate(lengths)
    ]
    ids, spans, at = [0] * padding, [], padding
    for i, length in enumerate(lengths):
      # Ids that neither grow by one nor sort: only equality may matter.
      ids += [(i * 5) % 7 + 1 + 7 * i] * length + [0] * padding
      spans.append((at, at + length))
      at += length + padding
    segment_ids = jnp.array([ids], jnp.int32)

    def packed(state, parts):
      def pack(*leaves):
        gap = jnp.full_like(leaves[0][:, :1], 3.0)
        gap = jnp.repeat(gap, padding, axis=1)
        joined = [gap]
        for leaf in leaves:
          joined += [leaf, gap]
        return jnp.concatenate(joined, axis=1)

      final, outputs = subject.chunk(
        state, jax.tree.map(pack, *parts), segment_ids
      )
      final = final._replace(segment_id=jnp.ones_like(final.segment_id))
      return final, [outputs[:, a:b] for a, b in spans]

    def separate(state, parts):
      results = [subject.reference(state, part) for part in parts]
      return results[-1][0], [outputs for _, outputs in results]

    arguments = state, parts
    assert_agree(
      value_and_gradients(packed, arguments),
      value_and_gradients(separate, arguments),
      "packed",
    )


def check_packed_against_reference(
  subject: Subject, segment_ids: np.ndarray
) -> None:
  """Level 7: any segment ids, from a state inside a chunk, as the reference.

  Also cuts the row in two: the second half continues what the first left.
  """
  with jax.enable_x64(True):
    batch, time = segment_ids.shape
    ids = jnp.asarray(segment_ids, jnp.int32)
    fresh = subject.state(batch=batch)
    state, _ = subject.reference(
      subject.state(seed=3, batch=batch), subject.inputs(3, 4, batch=batch)
    )
    inputs = subject.inputs(time, batch=batch)

    def in_two(state, fresh, inputs):
      middle, outputs = time // 2, []
      for part in (slice(None, middle), slice(middle, None)):
        state, y = subject.chunk(
          state,
          jax.tree.map(lambda x: x[:, part], inputs),  # noqa: B023
          ids[:, part],
          fresh,
        )
        outputs.append(y)
      return state, jnp.concatenate(outputs, axis=1)

    def whole(function, state, fresh, inputs):
      return function(state, inputs, ids, fresh)

    arguments = state, fresh, inputs
    reference = functools.partial(whole, subject.reference)
    expected = value_and_gradients(reference, arguments)
    chunk = functools.partial(whole, subject.chunk)
    for name, function in (("one call", chunk), ("two calls", in_two)):
      assert_agree(value_and_gradients(function, arguments), expected, name)


def check_padding(subject: Subject, time: int) -> None:
  """Level 7: padding leaves the state bit-equal and outputs exact zeros."""
  state, _ = subject.reference(subject.state(), subject.inputs(3, 4))
  inputs = jax.tree.map(lambda x: x + jnp.nan, subject.inputs(time))
  none = jnp.zeros((inputs.query.shape[0], time), jnp.int32)
  new_state, outputs = jax.jit(subject.chunk)(state, inputs, none)
  errors.assert_equal(new_state, state, "state after padding")
  errors.assert_equal(outputs, jnp.zeros_like(outputs), "outputs at padding")


def check_causal(subject: Subject, time: int) -> None:
  """Level 7: outputs do not depend on later inputs, exactly."""
  state, inputs = subject.state(), subject.inputs(time)
  middle = time // 2

  def early(inputs):
    return jnp.sum(jnp.square(subject.chunk(state, inputs)[1][:, :middle]))

  gradient = jax.jit(jax.grad(early))(inputs)
  late = jax.tree.map(lambda x: x[:, middle:], gradient)
  errors.assert_equal(late, jax.tree.map(jnp.zeros_like, late), "causality")
  before = jax.tree.map(lambda x: x[:, :middle], gradient)
  if not all(jnp.any(x != 0) for x in (before.query, before.value)):
    raise AssertionError("the gradient is zero everywhere: nothing was checked")


def check_deterministic(subject: Subject, time: int) -> None:
  """Level 7: two runs agree to the last bit, values and gradients."""
  arguments = subject.state(), subject.inputs(time)
  errors.assert_equal(
    value_and_gradients(subject.chunk, arguments),
    value_and_gradients(subject.chunk, arguments),
    "values and gradients",
  )


def check_edges(subject: Subject, time: int) -> None:
  """Level 8: finite values and gradients at the edges of the inputs."""
  state = subject.state()
  cases = subject.memory.edges(subject.inputs(time))
  names, inputs = zip(*cases.items(), strict=True)
  stacked = jax.tree.map(lambda *x: jnp.concatenate(x), *inputs)
  state = jax.tree.map(lambda x: jnp.concatenate([x] * len(names)), state)
  results = value_and_gradients(subject.chunk, (state, stacked))
  rows = subject.state().segment_id.shape[0]
  for i, name in enumerate(names):
    part = slice(i * rows, (i + 1) * rows)
    take = functools.partial(_rows, part=part)
    errors.assert_finite(jax.tree.map(take, results), name)


def _rows(x: jax.Array, part: slice) -> jax.Array:
  return x[part] if x.ndim else x


def _is_float(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)


def _with_wide_gates(inputs: Any, wide: Any, dtype: Any) -> Any:
  gates = {
    name: getattr(wide, name).astype(dtype)
    for name in ("log_decay", "write_rate", "write_logit")
    if getattr(wide, name, None) is not None
  }
  return inputs._replace(**gates)
