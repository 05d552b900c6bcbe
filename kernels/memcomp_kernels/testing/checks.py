"""The contract, as checks of one memory, Spec and implementation.

Each check raises AssertionError if a promise of `contract` is broken. Results
are compared with the reference in float64. The checks switch `jax.enable_x64`
themselves.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels.testing import errors, gradients, tolerances
from memcomp_kernels.testing import memory as memory_lib
from memcomp_kernels.testing.gradients import is_float, value_and_gradients

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
      gradients.compiled(subject.chunk)(*arguments),
      gradients.compiled(subject.reference)(*arguments),
      tolerances.VALUE["float64"],
      f"values, time {time}",
    )


def check_finite_differences(subject: Subject, time: int) -> None:
  """Level 5: the reference's gradients are derivatives, in float64.

  Central differences along a random direction of all arguments are compared.
  """
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(time)
    _, gradient = value_and_gradients(subject.reference, arguments)
    rng = np.random.default_rng(5)
    direction = jax.tree.map(
      lambda x: rng.standard_normal(x.shape) if is_float(x) else 0,
      arguments,
    )

    def moved(scale):
      return jax.tree.map(
        lambda x, d: x + scale * d if is_float(x) else x,
        arguments,
        direction,
      )

    # These are the cotangents that `value_and_gradients` draws.
    h, rng = 1e-5, np.random.default_rng(9)
    outputs = []
    for sign in (1, -1):
      result, _ = value_and_gradients(subject.reference, moved(sign * h))
      outputs.append([x for x in jax.tree.leaves(result) if is_float(x)])
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
  """Levels 3 and 5: rounding errors are bounded; inputs are rounded first."""
  with jax.enable_x64(True):
    state = gradients.cast(subject.state(), jnp.float32)
    inputs = gradients.cast(subject.inputs(time), dtype)
    # Gates are float32 in every run. A bfloat16 log decay of -0.02 would err by
    # more than anything that the memory does.
    inputs = _with_wide_gates(inputs, subject.inputs(time), jnp.float32)
    exact = gradients.cast((state, inputs), jnp.float64)
    expected = value_and_gradients(subject.reference, exact)
  results = value_and_gradients(subject.chunk, (state, inputs))
  got_state, got = results[0]
  if got.dtype != inputs.query.dtype:
    raise AssertionError(f"output is {got.dtype}, not the query's dtype")
  for leaf in jax.tree.leaves(got_state):
    if is_float(leaf) and leaf.dtype != jnp.float32:
      raise AssertionError(f"a state is {leaf.dtype}, not float32")
  assert_agree(results, expected, dtype, dtype)


def check_hand_off(
  subject: Subject, piece: int, pieces: int, *, with_gradients: bool = True
) -> None:
  """Level 6: pieces with the state passed on equal one call, and so do steps.

  For steps only values are compared. The reference is a scan of steps, and
  other checks compare its gradients.

  Args:
    subject: what is checked.
    piece: tokens per piece. If it and the chunk size are coprime, every offset
      into a chunk occurs.
    pieces: number of pieces.
    with_gradients: whether gradients through all pieces are compared too.
  """
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(piece * pieces)

    def in_pieces(state, inputs):
      state, outputs = jax.lax.scan(subject.chunk, state, _cut(inputs, pieces))
      return state, _join(outputs)

    def by_step(state, inputs):
      by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
      state, outputs = jax.lax.scan(subject.step, state, by_time)
      return state, jnp.moveaxis(outputs, 0, 1)

    # This is the program that `check_truth` compiled.
    whole = value_and_gradients(subject.chunk, arguments)
    functions = {"steps": by_step}
    if with_gradients:
      assert_agree(value_and_gradients(in_pieces, arguments), whole, "pieces")
    else:
      functions["pieces"] = in_pieces
    for name, function in functions.items():
      errors.assert_close(
        gradients.compiled(function)(*arguments),
        whole[0],
        tolerances.VALUE["float64"],
        name,
      )


def check_packing(subject: Subject, lengths: list[int], padding: int) -> None:
  """Level 7: a packed row equals its segments alone, forward and backward.

  Args:
    subject: what is checked.
    lengths: lengths of the segments in the row.
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
      # The ids neither grow by one nor are sorted: only equality may matter.
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
        state, jax.tree.map(pack, *parts), segment_ids, state
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
  subject: Subject,
  segment_ids: np.ndarray,
  *,
  in_two: bool = True,
  gradient: bool = True,
) -> None:
  """Level 7: any segment ids, from states inside a chunk, as the reference.

  New segments start from a fresh state in the first row, and from states some
  way into a sequence in the others.

  Args:
    subject: what is checked.
    segment_ids: `[batch, time]`, an even number of tokens.
    in_two: whether to also cut the rows in two. The second half then continues
      from the state after the first.
    gradient: whether gradients are compared, too.
  """
  with jax.enable_x64(True):
    batch, time = segment_ids.shape
    ids = jnp.asarray(segment_ids, jnp.int32)
    state, reset = _continued(subject, batch), states_inside(subject, batch)
    inputs = subject.inputs(time, batch=batch)

    def two_calls(state, inputs, ids, reset):
      def body(state, half):
        inputs, ids = half
        return subject.chunk(state, inputs, ids, reset)

      halves = _cut((inputs, ids), 2)
      state, outputs = jax.lax.scan(body, state, halves)
      return state, _join(outputs)

    arguments = state, inputs, ids, reset
    measured = functools.partial(
      value_and_gradients, arguments=arguments, gradient=gradient
    )
    expected = measured(subject.reference)
    functions: dict[str, Callable] = {"one call": subject.chunk}
    if in_two:
      functions["two calls"] = two_calls
    for name, function in functions.items():
      assert_agree(measured(function), expected, name)


def check_padding(
  subject: Subject, time: int, batch: int, *, packed_program: bool = False
) -> None:
  """Level 7: padding leaves the state bit-equal and outputs exact zeros.

  Args:
    subject: what is checked.
    time: tokens per row.
    batch: number of rows.
    packed_program: whether to run the gradient program that
      `check_packed_against_reference` compiles for rows of this shape. If that
      check runs too, this costs less than a program for values alone.
  """
  with jax.enable_x64(True):
    fresh, state = subject.state(batch=batch), _continued(subject, batch)
    inputs = subject.inputs(time, batch=batch)
    inputs = jax.tree.map(lambda x: x + jnp.nan, inputs)
    none = jnp.zeros((batch, time), jnp.int32)
    arguments = state, inputs, none, fresh
    if packed_program:
      (new_state, outputs), _ = value_and_gradients(subject.chunk, arguments)
    else:
      new_state, outputs = gradients.compiled(subject.chunk)(*arguments)
    errors.assert_equal(new_state, state, "state after padding")
    errors.assert_equal(outputs, jnp.zeros_like(outputs), "outputs at padding")


# The next three checks use the program of `check_truth`, which is in float64.


def check_causal(subject: Subject, time: int, *, x64: bool = True) -> None:
  """Level 7: outputs do not depend on later inputs, exactly."""
  with jax.enable_x64(x64):
    arguments = subject.state(), subject.inputs(time)
    middle = time // 2
    cotangents = gradients.random_cotangents(subject.chunk, arguments)
    cotangents = [0 * c for c in cotangents]
    cotangents[-1][:, :middle] = 1.0  # the outputs, which come last
    derivative = gradients.derivative(subject.chunk)
    _, (_, gradient) = derivative(arguments, cotangents)
    late = jax.tree.map(lambda x: x[:, middle:], gradient)
    errors.assert_equal(late, jax.tree.map(jnp.zeros_like, late), "causality")
    before = jax.tree.map(lambda x: x[:, :middle], gradient)
    if not all(jnp.any(x != 0) for x in (before.query, before.value)):
      raise AssertionError(
        "the gradient is zero everywhere: nothing was checked"
      )


def check_deterministic(
  subject: Subject, time: int, *, x64: bool = True
) -> None:
  """Level 7: two runs agree to the last bit, values and gradients."""
  with jax.enable_x64(x64):
    arguments = subject.state(), subject.inputs(time)
    errors.assert_equal(
      value_and_gradients(subject.chunk, arguments),
      value_and_gradients(subject.chunk, arguments),
      "values and gradients",
    )


def check_edges(
  subject: Subject,
  time: int,
  segment_ids: np.ndarray | None = None,
  *,
  x64: bool = True,
) -> None:
  """Level 8: finite values and gradients at the edges of the inputs.

  Args:
    subject: what is checked.
    time: tokens per row.
    segment_ids: segment ids of packed rows; None for one segment.
    x64: whether to run in float64 or in float32, which overflows earlier.
  """
  packed = segment_ids is not None
  with jax.enable_x64(x64):
    batch = len(segment_ids) if packed else dict(subject.sizes)["batch"]
    ids = jnp.asarray(segment_ids, jnp.int32) if packed else None
    state = subject.state(batch=batch)
    inputs = subject.inputs(time, batch=batch)
    derivative = gradients.derivative(subject.chunk)
    for name, edge in subject.memory.edges(inputs).items():
      arguments = (state, edge, ids, state) if packed else (state, edge)
      errors.assert_finite(derivative(arguments), name)


def check_strong_decays(
  subject: Subject, time: int, dtype: str, *, least_key: float = 0.0
) -> None:
  """Level 8: any log decay down to -inf gives the reference's results.

  Values and gradients are compared. Some tokens forget everything, by log
  decays of many sizes, and others nearly everything. Later tokens must not lose
  a digit by this.

  Args:
    subject: what is checked.
    time: tokens per row.
    dtype: "float64" or "float32".
    least_key: least magnitude of a key's entries.
  """
  with jax.enable_x64(True):
    state = gradients.cast(subject.state(), dtype)
    inputs = gradients.cast(subject.inputs(time), dtype)
    inputs = inputs._replace(log_decay=strong_decays(inputs.log_decay))
    key = inputs.key
    key = jnp.copysign(jnp.maximum(jnp.abs(key), least_key), key)
    inputs = inputs._replace(key=key)
    exact = gradients.cast((state, inputs), jnp.float64)
    expected = value_and_gradients(subject.reference, exact)
    errors.assert_finite(expected, "reference")
  with jax.enable_x64(dtype == "float64"):
    results = value_and_gradients(subject.chunk, (state, inputs))
  assert_agree(results, expected, f"strong decays in {dtype}", dtype)


def strong_decays(log_decay: jax.Array) -> jax.Array:
  """Replaces some log decays with strong ones, drawn by position.

  In the last row nearly all are about as strong as a float32 can represent.
  """
  rng = np.random.default_rng(13)
  strong = rng.choice([-1e2, -1e3, -1e6, -1e30, -np.inf], log_decay.shape)
  where = rng.random(log_decay.shape) < 0.15
  moderate = rng.random(log_decay.shape) < 0.8
  moderate[:-1] = False
  log_decay = jnp.where(moderate, 70 * log_decay - 30, log_decay)
  return jnp.where(where, strong.astype(log_decay.dtype), log_decay)


def check_empty(subject: Subject) -> None:
  """Level 8: without rows or tokens, outputs are empty and states unchanged."""
  for batch, time in ((0, 3), (2, 0)):
    state, inputs = subject.state(batch=batch), subject.inputs(3, batch=batch)
    inputs = jax.tree.map(lambda x, n=time: x[:, :n], inputs)
    ids = jnp.ones((batch, time), jnp.int32)
    whole = jax.eval_shape(subject.chunk, subject.state(), subject.inputs(3))[1]
    for packing in ((), (ids, state)):
      for form in (subject.chunk, subject.reference):
        what = f"{batch} rows of {time} tokens"
        new_state, y = form(state, inputs, *packing)
        errors.assert_equal(new_state, state, what)
        if (y.shape, y.dtype) != ((batch, time, *whole.shape[2:]), whole.dtype):
          raise AssertionError(f"{what}: outputs are {y.dtype}{y.shape}")

      def total(state, inputs, packing=packing):
        found = subject.chunk(state, inputs, *packing)
        return sum(jnp.sum(x) for x in jax.tree.leaves(found) if is_float(x))

      gradient = jax.grad(total, (0, 1), allow_int=True)(state, inputs)
      errors.assert_finite(
        [x for x in jax.tree.leaves(gradient) if is_float(x)], "empty"
      )


def check_strict(subject: Subject, time: int) -> None:
  """Traces in a program that forbids promotion of dtypes and of ranks.

  It traces values and gradients, of one segment and of packed rows, and a step.
  """
  state = gradients.cast(subject.state(), jnp.float32)
  wide = subject.inputs(time)
  narrow = gradients.cast(wide, jnp.bfloat16)
  narrow = _with_wide_gates(narrow, wide, jnp.float32)
  ids = jnp.ones(wide.query.shape[:2], jnp.int32)
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    for inputs, *packing in (
      (narrow,),
      (narrow, ids, state),
      (wide, ids, state),
    ):
      arguments = state, inputs, *packing
      cotangents = gradients.random_cotangents(subject.reference, arguments)
      # With jit, JAX traces a gradient's rules outside of the call.
      differentiated = gradients.differentiated(jax.jit(subject.chunk))
      jax.eval_shape(differentiated, arguments, cotangents)
    first = jax.tree.map(lambda x: x[:, 0], narrow)
    jax.eval_shape(subject.step, state, first)


def _continued(subject: Subject, batch: int) -> Any:
  """Returns a state some tokens after the state of `Subject.state`."""
  state, inputs = (
    subject.state(seed=3, batch=batch),
    subject.inputs(3, 4, batch=batch),
  )
  return subject.reference(state, inputs)[0]


def _cut(tree: Any, pieces: int) -> Any:
  """Cuts `[batch, time, ...]` into `[pieces, batch, time / pieces, ...]`."""

  def cut(x):
    x = x.reshape(x.shape[0], pieces, -1, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  return jax.tree.map(cut, tree)


def _join(outputs: jax.Array) -> jax.Array:
  """Undoes `_cut` for one array."""
  outputs = jnp.moveaxis(outputs, 0, 1)
  return outputs.reshape(len(outputs), -1, *outputs.shape[3:])


def _with_wide_gates(inputs: Any, wide: Any, dtype: Any) -> Any:
  gates = {
    name: getattr(wide, name).astype(dtype)
    for name in ("log_decay", "write_rate", "write_logit")
    if getattr(wide, name, None) is not None
  }
  return inputs._replace(**gates)
