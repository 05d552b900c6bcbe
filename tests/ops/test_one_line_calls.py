"""Every op, called in one line, is its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest
import rotation

import memcomp_kernels
from memcomp_kernels import FRESH, derivative, linear_attention
from memcomp_kernels.testing import errors, gradients, memories, tolerances

CASES = pytest.mark.parametrize("name", op_cases.CASES)

# The signatures that differ; ops of one kind are called alike.
KINDS = (
  "gated_delta_rule",
  "softmax_attention",
  "trellis",
)

# The contract suite holds every form's gradient to the definition. Here those
# are asked for that compile fast; of two names for the same code, one.
QUICK = ("gated_delta_rule",)
ALL_BUT = ("delta_rule", "gated_slot_attention")

HALF = op_cases.TIME // 2

# Padding, a segment that goes on and one that does not, ids that come again.
IDS = jnp.array(
  [[1, 1, 0, 1, 3, 3, 3, 3, 0, 2, 2, 2], [7, 7, 7, 1, 1, 1, 1, 1, 1, 7, 0, 0]],
  jnp.int32,
)


def halves(case):
  return (
    jax.tree.map(lambda x: x[:, :HALF], case.inputs()),
    jax.tree.map(lambda x: x[:, HALF:], case.inputs()),
  )


def direction_of(tree):
  """A random tangent of every floating leaf."""
  rng = np.random.default_rng(3)

  def one(x):
    if gradients.is_float(x):
      return rng.standard_normal(x.shape).astype(x.dtype)
    return np.zeros(x.shape, jax.dtypes.float0)

  return jax.tree.map(one, tree)


def floats(tree, tangents=None):
  """The leaves that have tangents."""
  tangents = tree if tangents is None else tangents
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(tangents), strict=True)
  return [x for x, t in pairs if t.dtype != jax.dtypes.float0]


def inner(a, b):
  wide = (
    np.asarray(x, np.float64) for pair in zip(a, b, strict=True) for x in pair
  )
  return sum(np.vdot(x, y) for x, y in zip(wide, wide, strict=True))


@pytest.mark.parametrize("name", rotation.cases(op_cases.CASES, KINDS))
def test_states_and_packed_rows(name):
  """A fresh state by default, handed on; then packed rows that begin anew.

  By the definition itself, for the forms are equal to it: what is checked is
  what the call makes of its arguments.
  """
  case = op_cases.CASES[name]
  first, second = halves(case)
  fresh = case.fresh()

  def one_line(first, second):
    arrays = case.arrays(first), case.arrays(second)
    call = {"implementation": "reference"}
    y, state = case(arrays[0], **call)
    call |= {"segment_ids": IDS, "reset_state": memcomp_kernels.FRESH}
    return (state, y), case(arrays[1], initial_state=state, **call)[::-1]

  def definition(first, second):
    state, y = case.op.reference(fresh, first, spec=case.spec)
    call = {"spec": case.spec, "segment_ids": IDS, "reset_state": fresh}
    return (state, y), case.op.reference(state, second, **call)

  found = jax.jit(one_line)(first, second)
  expected = jax.jit(definition)(first, second)
  errors.assert_close(found, expected, tolerances.VALUE["float32"], name)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
    for name in op_cases.CASES
    if name not in ALL_BUT
  ],
)
def test_derivatives(name):
  """Values, and gradients in every array and in the state that is given.

  Gradients are compared with forward-mode derivatives of the definition, along
  a random direction of all arguments.
  """
  case = op_cases.CASES[name]
  first, second = halves(case)
  step = functools.partial(case.op.reference, spec=case.spec)
  state, _ = jax.jit(step)(case.fresh(), first)

  def one_line(state, inputs):
    return case(case.arrays(inputs), state=state)[::-1]

  arguments = jax.device_get((state, second))
  found, gradient = gradients.value_and_gradients(one_line, arguments)
  tangents = direction_of(arguments)
  expected, moved = jax.jit(lambda x, dx: jax.jvp(step, x, dx))(
    arguments, tangents
  )
  errors.assert_close(found, expected, tolerances.VALUE["float32"], name)
  cotangents = gradients.random_cotangents(step, arguments)
  forward = inner(cotangents, floats(moved))
  reverse = inner(floats(gradient, tangents), floats(tangents))
  error = abs(reverse - forward) / np.sqrt(inner(floats(moved), floats(moved)))
  assert error <= tolerances.GRADIENT["float32"]
  for array, x in case.arrays(gradient[1]).items():
    assert np.any(x != 0), (
      f"the gradient of {array} is zero: nothing is checked"
    )


@pytest.mark.parametrize("name", rotation.cases(op_cases.CASES, KINDS))
def test_mapped_in_bfloat16(name):
  """Outputs are as wide as queries, states are float32."""
  case = op_cases.CASES[name]
  first, _ = halves(case)
  arrays = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((2, 1, *x.shape[1:]), jnp.bfloat16),
    case.arrays(first),
  )
  y, state = jax.eval_shape(jax.vmap(case), arrays)
  assert (y.shape[:3], y.dtype) == ((2, 1, HALF), jnp.bfloat16)
  dtypes = {x.dtype for x in jax.tree.leaves(state)}
  assert dtypes == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_mapped_over_rows():
  """Values and gradients of `jax.vmap`, from states that differ."""
  case = op_cases.CASES["linear_attention"]
  first, second = halves(case)
  _, state = jax.jit(case)(case.arrays(first))

  def call(state, inputs):
    return case(case.arrays(inputs), state=state)[::-1]

  def mapped(state, inputs):
    alone = jax.tree.map(lambda x: x[:, None], (state, inputs))
    return jax.tree.map(lambda x: x[:, 0], jax.vmap(call)(*alone))

  found = gradients.value_and_gradients(mapped, (state, second))
  expected = gradients.value_and_gradients(call, (state, second))
  errors.assert_close(found, expected, tolerances.GRADIENT["float32"], "vmap")


@pytest.mark.parametrize("name", rotation.cases(op_cases.CASES, KINDS))
def test_forward_mode(name):
  """Values, or one line that says what to do."""
  case = op_cases.CASES[name]
  first, _ = halves(case)
  arrays = case.arrays(first)

  def derivative_of(implementation):
    def outputs(v):
      return case(arrays | {"v": v}, implementation=implementation)[0]

    return jax.jit(lambda v: jax.jvp(outputs, (v,), (v,)))

  if name in op_cases.FORWARD_MODE:
    errors.assert_close(
      derivative_of(None)(arrays["v"]),
      derivative_of("reference")(arrays["v"]),
      tolerances.GRADIENT["float32"],
      name,
    )
    return
  with pytest.raises(TypeError, match="forward-mode") as raised:
    derivative_of(None).lower(arrays["v"])
  assert str(raised.value) == derivative.REFUSAL


def test_forward_mode_is_refused_however_it_is_asked_for():
  assert "\n" not in derivative.REFUSAL
  case = op_cases.CASES["delta_rule"]
  first, _ = halves(case)
  arrays = case.arrays(first)

  def outputs(v):
    return case(arrays | {"v": v})[0]

  v = arrays["v"]
  for ask in (
    lambda: jax.jvp(outputs, (v,), (v,)),
    lambda: jax.jvp(jax.jit(outputs), (v,), (v,)),
    lambda: jax.jit(jax.jacfwd(outputs))(v),
    lambda: jax.jit(lambda v: jax.linearize(outputs, v)[1](v))(v),
    lambda: jax.eval_shape(jax.hessian(lambda v: jnp.sum(outputs(v))), v),
  ):
    with pytest.raises(TypeError) as raised:
      ask()
    assert str(raised.value) == derivative.REFUSAL


def test_a_state_that_was_saved_takes_a_step():
  """Numpy's arrays have not all methods of JAX's."""
  op = memcomp_kernels.softmax_attention
  q = jnp.ones((1, 2, 1, 3))
  _, state = jax.jit(lambda q: op(q, q, q, window_size=4))(q)
  inputs = op.Inputs(q[:, 0], q[:, 0], q[:, 0])
  found, expected = (
    op.step(x, inputs, spec=op.Spec(window_size=4))
    for x in (jax.device_get(state), state)
  )
  errors.assert_equal(found, expected, "step")


def test_a_step_refuses_a_state_of_another_spec():
  """As a call of many tokens does."""
  attention, trellis = (
    memcomp_kernels.softmax_attention,
    memcomp_kernels.trellis,
  )
  q = jnp.ones((1, 2, 1, 3))
  _, state = attention(q, q, q, window_size=2)
  inputs = attention.Inputs(q[:, 0], q[:, 0], q[:, 0])
  with pytest.raises(
    ValueError, match=r"state holds 2 tokens, spec.window_siz"
  ):
    attention.step(state, inputs, spec=attention.Spec(window_size=8))
  subject = memories.MEMORIES["trellis"]
  sizes = {"batch": 1, "heads": 1, "key_dim": 3, "value_dim": 3}
  spec = trellis.Spec(chunk_size=4)
  key = jax.random.key(0)
  state = subject.make_state(key, spec, **sizes)
  state = state._replace(position=jnp.array([3], jnp.int32))
  inputs = subject.make_inputs(key, spec, time=1, **sizes)
  with pytest.raises(ValueError, match="3 tokens into its chunk"):
    trellis.step(
      state,
      jax.tree.map(lambda x: x[:, 0], inputs),
      spec=trellis.Spec(chunk_size=2),
    )


@pytest.mark.slow
def test_segments_start_from_a_prompt_that_is_longer_than_the_call():
  """A fresh state says nothing of how much `reset_state` has seen."""
  case = op_cases.CASES["key_value_means"]
  prompt = case.inputs()
  arrays = case.arrays(jax.tree.map(lambda x: x[:, :HALF], prompt))

  @jax.jit
  def run(prompt, arrays):
    form = {"implementation": "reference"}
    _, state = case(case.arrays(prompt), **form)
    call = functools.partial(case, arrays, segment_ids=IDS, reset_state=state)
    return call()[0], call(**form)[0], state

  found, expected, state = run(prompt, arrays)
  errors.assert_close(found, expected, tolerances.VALUE["float32"], "y")
  # Outside of `jax.jit` the prompt's count can be read, and is no error.
  call = functools.partial(case, segment_ids=IDS, reset_state=state)
  jax.eval_shape(call, arrays)


@pytest.mark.parametrize("number", [5, -5])
def test_a_segment_goes_on_after_a_call_without_ids(number):
  """Any number but 0, which is padding, names a segment."""

  @jax.jit
  def states():
    q = jnp.ones((1, 2, 1, 3))
    ids = jnp.full((1, 2), number)
    _, state = linear_attention(q, q, q, segment_ids=ids)
    _, state = linear_attention(q, q, q, state=state)
    again = {"segment_ids": ids, "reset_state": FRESH}
    _, found = linear_attention(q, q, q, state=state, **again)
    return found, linear_attention(q, q, q, state=state)[1]

  found, expected = states()
  errors.assert_equal(found, expected, "state")


@pytest.mark.slow
def test_softmax_attention_needs_room_for_later_calls():
  op = memcomp_kernels.softmax_attention
  q = jax.random.normal(jax.random.key(0), (1, 8, 1, 4))
  first, last = q[:, :4], q[:, 4:]
  expected, _ = op(q, q, q)
  _, state = op(first, first, first)
  with pytest.raises(ValueError) as raised:
    op(last, last, last, state=state)
  assert str(raised.value) == (
    "softmax_attention: the state has room for 4 tokens and holds 4; 4 more"
    " need length=8 in the first call"
  )
  with pytest.raises(ValueError, match="a segment needs length=8"):
    op(
      last,
      last,
      last,
      state=state,
      segment_ids=jnp.ones((1, 4), jnp.int32),
      reset_state=memcomp_kernels.FRESH,
    )
  found, _ = op(q, q, q, length=None)  # as its signature says
  errors.assert_close(found, expected, 1e-5)
  for options in ({"length": 8}, {"window_size": 8}):
    keywords = {k: v for k, v in options.items() if k != "length"}
    _, state = op(first, first, first, **options)
    found, _ = op(last, last, last, state=state, **keywords)
    errors.assert_close(found, expected[:, 4:], 1e-5)


def test_heads_that_share_a_key_follow_from_the_arrays():
  ssd = jax.jit(
    memcomp_kernels.ssd, static_argnames=["heads_per_group", "skip"]
  )
  draw = functools.partial(jax.random.normal, jax.random.key(0))
  q, k, v = draw((2, 5, 2, 4)), draw((2, 5, 2, 4)) / 2, draw((2, 5, 6, 3))
  g = -jnp.ones((2, 5, 6))
  found, _ = ssd(q, k, v, g, dt=-g)
  q, k = (jnp.repeat(x, 3, axis=2) for x in (q, k))
  expected, _ = ssd(q, k, v, g, dt=-g, heads_per_group=1, skip=False)
  errors.assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("name", ["lattice", "tensor_cache"])
def test_help_tells_the_shape_of_the_output(name):
  case = op_cases.CASES[name]
  y, _ = jax.eval_shape(case, case.arrays(case.inputs()))
  op = getattr(memcomp_kernels, name)
  width = case.inputs().value.shape[-1] * (1 + (name == "tensor_cache"))
  assert y.shape[-1] == width
  assert f"Returns y `[{op.output}]`" in op.__doc__
  assert op.output.endswith("2 * value_dim") == (name == "tensor_cache")
