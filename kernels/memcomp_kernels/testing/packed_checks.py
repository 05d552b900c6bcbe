"""Checks of packed rows and of padding; see `checks`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels.testing import errors, gradients, subjects
from memcomp_kernels.testing.gradients import value_and_gradients
from memcomp_kernels.testing.subjects import Subject


def check_packing(subject: Subject, lengths: list[int], padding: int) -> None:
  """A packed row equals its segments alone, forward and backward.

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
    subjects.assert_agree(
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
  """Any segment ids, from states inside a chunk, as the reference.

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
    state, reset = (
      subjects.continued(subject, batch),
      subjects.states_inside(subject, batch),
    )
    inputs = subject.inputs(time, batch=batch)

    def two_calls(state, inputs, ids, reset):
      def body(state, half):
        inputs, ids = half
        return subject.chunk(state, inputs, ids, reset)

      halves = subjects.cut_time((inputs, ids), 2)
      state, outputs = jax.lax.scan(body, state, halves)
      return state, subjects.join_time(outputs)

    arguments = state, inputs, ids, reset
    measured = functools.partial(
      value_and_gradients, arguments=arguments, gradient=gradient
    )
    expected = measured(subject.reference)
    functions: dict[str, Callable] = {"one call": subject.chunk}
    if in_two:
      functions["two calls"] = two_calls
    for name, function in functions.items():
      subjects.assert_agree(measured(function), expected, name)


def check_padding(
  subject: Subject, time: int, batch: int, *, packed_program: bool = False
) -> None:
  """Padding leaves the state bit-equal and outputs exact zeros.

  Args:
    subject: what is checked.
    time: tokens per row.
    batch: number of rows.
    packed_program: whether to run the gradient program that
      `check_packed_against_reference` compiles for rows of this shape. If that
      check runs too, this costs less than a program for values alone.
  """
  with jax.enable_x64(True):
    fresh, state = (
      subject.state(batch=batch),
      subjects.continued(subject, batch),
    )
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
