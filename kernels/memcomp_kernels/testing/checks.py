"""The contract, as checks of one memory, Spec and implementation.

Each check raises AssertionError if a promise of `contract` is broken. Results
are compared with the reference in float64. The checks switch `jax.enable_x64`
themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels.testing import errors, gradients, subjects, tolerances
from memcomp_kernels.testing.gradients import is_float, value_and_gradients
from memcomp_kernels.testing.subjects import Subject


def check_truth(subject: Subject, time: int) -> None:
  """Float64 values and gradients equal the reference's."""
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(time)
    subjects.assert_agree(
      value_and_gradients(subject.chunk, arguments),
      value_and_gradients(subject.reference, arguments),
      f"time {time}",
    )


def check_values(subject: Subject, time: int) -> None:
  """Float64 outputs and final state equal the reference's."""
  with jax.enable_x64(True):
    arguments = subject.state(), subject.inputs(time)
    errors.assert_close(
      gradients.compiled(subject.chunk)(*arguments),
      gradients.compiled(subject.reference)(*arguments),
      tolerances.VALUE["float64"],
      f"values, time {time}",
    )


def check_finite_differences(subject: Subject, time: int) -> None:
  """The reference's gradients are derivatives, in float64.

  Central differences along a random direction of all arguments are compared.
  """
  with jax.enable_x64(True):
    # On the host, where moving and summing compiles nothing.
    arguments = jax.device_get((subject.state(), subject.inputs(time)))
    _, gradient = jax.device_get(
      value_and_gradients(subject.reference, arguments)
    )
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
      result, _ = jax.device_get(
        value_and_gradients(subject.reference, moved(sign * h))
      )
      outputs.append([x for x in jax.tree.leaves(result) if is_float(x)])
    numeric = sum(
      np.sum(rng.standard_normal(a.shape).astype(np.float32) * (a - b))
      for a, b in zip(*outputs, strict=True)
    ) / (2 * h)
    analytic = sum(
      np.sum(g * d)
      for g, d in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True
      )
    )
    errors.assert_close(
      analytic, numeric, tolerances.FINITE_DIFFERENCE, "finite differences"
    )


def check_precision(subject: Subject, dtype: str, time: int) -> None:
  """Rounding errors are bounded; inputs are rounded first."""
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
  subjects.assert_agree(results, expected, dtype, dtype)


def check_hand_off(
  subject: Subject, piece: int, pieces: int, *, with_gradients: bool = True
) -> None:
  """Pieces with the state passed on equal one call, and so do steps.

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
      state, outputs = jax.lax.scan(
        subject.chunk, state, subjects.cut_time(inputs, pieces)
      )
      return state, subjects.join_time(outputs)

    def by_step(state, inputs):
      by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
      state, outputs = jax.lax.scan(subject.step, state, by_time)
      return state, jnp.moveaxis(outputs, 0, 1)

    # This is the program that `check_truth` compiled.
    whole = value_and_gradients(subject.chunk, arguments)
    functions = {"steps": by_step}
    if with_gradients:
      subjects.assert_agree(
        value_and_gradients(in_pieces, arguments), whole, "pieces"
      )
    else:
      functions["pieces"] = in_pieces
    for name, function in functions.items():
      errors.assert_close(
        gradients.compiled(function)(*arguments),
        whole[0],
        tolerances.VALUE["float64"],
        name,
      )


# The next three checks use the program of `check_truth`, which is in float64.


def check_causal(subject: Subject, time: int, *, x64: bool = True) -> None:
  """Outputs do not depend on later inputs, exactly."""
  with jax.enable_x64(x64):
    arguments = subject.state(), subject.inputs(time)
    middle = time // 2
    cotangents = gradients.random_cotangents(subject.chunk, arguments)
    cotangents = [0 * c for c in cotangents]
    cotangents[-1][:, :middle] = 1.0  # the outputs, which come last
    derivative = gradients.derivative(subject.chunk)
    _, (_, gradient) = jax.device_get(derivative(arguments, cotangents))
    late = jax.tree.map(lambda x: x[:, middle:], gradient)
    errors.assert_equal(late, jax.tree.map(np.zeros_like, late), "causality")
    before = jax.tree.map(lambda x: x[:, :middle], gradient)
    if not all(np.any(x != 0) for x in (before.query, before.value)):
      raise AssertionError(
        "the gradient is zero everywhere: nothing was checked"
      )


def check_deterministic(
  subject: Subject, time: int, *, x64: bool = True
) -> None:
  """Two runs agree to the last bit, values and gradients."""
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
  """Finite values and gradients at the edges of the inputs.

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
    for name, edge in jax.jit(subject.memory.edges)(inputs).items():
      arguments = (state, edge, ids, state) if packed else (state, edge)
      errors.assert_finite(derivative(arguments), name)


def check_strong_decays(
  subject: Subject, time: int, dtype: str, *, least_key: float = 0.0
) -> None:
  """Any log decay down to -inf gives the reference's results.

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
  subjects.assert_agree(results, expected, f"strong decays in {dtype}", dtype)


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
  """Without rows or tokens, outputs are empty and states unchanged."""
  some = jax.device_get((subject.state(batch=2), subject.inputs(3, batch=2)))
  whole = jax.eval_shape(subject.chunk, *some)[1]
  for batch, time in ((0, 3), (2, 0)):
    state = jax.tree.map(lambda x, n=batch: x[:n], some[0])
    inputs = jax.tree.map(lambda x, n=batch, m=time: x[:n, :m], some[1])
    ids = np.ones((batch, time), np.int32)
    for packing in ((), (ids, state)):

      def total(state, inputs, packing=packing):
        found = subject.chunk(state, inputs, *packing)
        return sum(jnp.sum(x) for x in jax.tree.leaves(found) if is_float(x))

      @jax.jit
      def run(state, inputs, packing, total=total):
        forms = subject.chunk, subject.reference
        found = [form(state, inputs, *packing) for form in forms]
        return found, jax.grad(total, (0, 1), allow_int=True)(state, inputs)

      found, gradient = run(state, inputs, packing)
      what = f"{batch} rows of {time} tokens"
      for new_state, y in found:
        errors.assert_equal(new_state, state, what)
        if (y.shape, y.dtype) != ((batch, time, *whole.shape[2:]), whole.dtype):
          raise AssertionError(f"{what}: outputs are {y.dtype}{y.shape}")
      errors.assert_finite(
        [x for x in jax.tree.leaves(gradient) if is_float(x)], "empty"
      )


def check_strict(subject: Subject, time: int) -> None:
  """Traces in a program that forbids promotion of dtypes and of ranks.

  It traces values and gradients, of one segment and of packed rows, and a step.
  """

  def given():
    wide = subject.inputs(time)
    narrow = gradients.cast(wide, jnp.bfloat16)
    narrow = _with_wide_gates(narrow, wide, jnp.float32)
    state = gradients.cast(subject.state(), jnp.float32)
    return state, wide, narrow, jax.tree.map(lambda x: x[:, 0], narrow)

  state, wide, narrow, first = jax.eval_shape(given)
  ids = jax.ShapeDtypeStruct(wide.query.shape[:2], jnp.int32)
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
    jax.eval_shape(subject.step, state, first)


def _with_wide_gates(inputs: Any, wide: Any, dtype: Any) -> Any:
  gates = {
    name: getattr(wide, name).astype(dtype)
    for name in ("log_decay", "write_rate", "write_logit")
    if getattr(wide, name, None) is not None
  }
  return inputs._replace(**gates)
