"""What an op's states and options refuse, in one line."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from memcomp_kernels import (
  FRESH,
  gated_delta_rule,
  lattice,
  linear_attention,
  ovq,
  softmax_attention,
  trellis,
  ttt,
)
from memcomp_kernels.testing import memories

q = k = jnp.zeros((2, 3, 4, 5))
v = jnp.zeros((2, 3, 4, 7))
g = beta = jnp.zeros((2, 3, 4))
ids = jnp.ones((2, 3), jnp.int32)
STATE = gated_delta_rule.init_state(batch=2, heads=4, key_dim=5, value_dim=7)
SLOTS = lattice.init_state(
  lattice.Spec(num_slots=5), batch=2, heads=4, value_dim=7
)
LATE = SLOTS._replace(position=jnp.full(2, 3))
# Room for 4 tokens, of which 3 are taken.
KEPT = softmax_attention.init_state(
  batch=2, heads=4, key_dim=5, value_dim=7, length=4
)._replace(position=jnp.full(2, 3))

# name -> (call, exception, its text)
ERRORS = {
  "state of another size": (
    lambda: gated_delta_rule(q[:1], k[:1], v[:1], g[:1], beta[:1], state=STATE),
    ValueError,
    "gated_delta_rule: state.memory has shape (2, 4, 5, 7), expected [batch=1,"
    " heads=4, key_dim=5, value_dim=7]",
  ),
  "narrow state": (
    lambda: gated_delta_rule(
      q,
      k,
      v,
      g,
      beta,
      state=STATE._replace(memory=STATE.memory.astype("bfloat16")),
    ),
    ValueError,
    "gated_delta_rule: state.memory has dtype bfloat16, expected float32 or"
    " float64",
  ),
  "state of another spec": (
    lambda: linear_attention(
      q,
      k,
      v,
      normalize=False,
      state=linear_attention.init_state(
        batch=2, heads=4, key_dim=5, value_dim=7
      ),
    ),
    ValueError,
    "linear_attention: state.normalizer is given, but normalize=False has no"
    " use for it; make the state with the same spec",
  ),
  "no reset_state": (
    lambda: gated_delta_rule(q, k, v, g, beta, state=STATE, segment_ids=ids),
    ValueError,
    "gated_delta_rule: segment_ids with a state need reset_state, what new"
    " segments start from: memcomp_kernels.FRESH, or a state",
  ),
  "reset_state of another size": (
    lambda: gated_delta_rule(
      q,
      k,
      v,
      g,
      beta,
      state=STATE,
      segment_ids=ids,
      reset_state=STATE._replace(memory=STATE.memory[:, :1]),
    ),
    ValueError,
    "gated_delta_rule: reset_state.memory has shape (2, 1, 5, 7), expected"
    " [batch=2, heads=4, key_dim=5, value_dim=7]",
  ),
  "two states": (
    lambda: gated_delta_rule(
      q, k, v, g, beta, state=STATE, initial_state=STATE
    ),
    TypeError,
    "gated_delta_rule: state and initial_state are the same; give one",
  ),
  "an option beside a state": (
    lambda: trellis(
      q,
      k,
      v,
      target=q,
      write_rate=beta,
      key_memory=q,
      state=trellis.init_state(
        trellis.Spec(num_slots=5), batch=2, heads=4, key_dim=5, value_dim=7
      ),
    ),
    TypeError,
    "trellis: key_memory: for a fresh state alone, and a state is given",
  ),
  "a bound that does not hold": (
    lambda: softmax_attention(
      q, k, v, state=softmax_attention(q, k, v, length=6)[1], max_position=2
    ),
    ValueError,
    "softmax_attention: state has seen 3 tokens, more than the given bound,"
    " max_position=2",
  ),
  "a bound that does not hold for the reset state": (
    lambda: softmax_attention.reference(
      KEPT._replace(position=0 * KEPT.position),
      softmax_attention.Inputs(q, k, v),
      spec=softmax_attention.Spec(),
      segment_ids=ids,
      reset_state=KEPT,
      max_position=2,
    ),
    ValueError,
    "softmax_attention: reset_state has seen 3 tokens, more than the given"
    " bound, max_position=2",
  ),
  "no room for the segment that the state began": (
    lambda: softmax_attention(
      q,
      k,
      v,
      state=KEPT._replace(segment_id=ids[:, 0]),
      segment_ids=ids.at[:, 2].set(0),
      reset_state=FRESH,
    ),
    ValueError,
    "softmax_attention: the state has room for 4 tokens and holds 3; a segment"
    " needs length=5 in the first call",
  ),
  "no room for the segments that a state begins": (
    lambda: softmax_attention(
      q,
      k,
      v,
      state=KEPT._replace(segment_id=ids[:, 0]),
      reset_state=KEPT,
      segment_ids=5 + ids,
    ),
    ValueError,
    "softmax_attention: the state has room for 4 tokens and holds 3; a segment"
    " needs length=6 in the first call",
  ),
  "a reset state of another batch": (
    lambda: softmax_attention(
      q,
      k,
      v,
      state=KEPT,
      reset_state=jax.tree.map(lambda x: jnp.repeat(x, 2, 0), KEPT),
      segment_ids=ids,
    ),
    ValueError,
    "softmax_attention: reset_state.keys has shape (4, 4, 4, 5), expected"
    " [batch=2, heads=4, length=4, key_dim=5]",
  ),
  "no room for the sinks": (
    lambda: softmax_attention(
      q, k, v, sink_tokens=4, state=KEPT._replace(position=ids[:, 0])
    ),
    ValueError,
    "softmax_attention: the state holds 4 tokens, no more than sink_tokens=4;"
    " make the state with the same spec",
  ),
  "a bound that is no count": (
    lambda: gated_delta_rule(q, k, v, g, beta, state=STATE, max_position=1.5),
    ValueError,
    "gated_delta_rule: max_position=1.5 must be an integer, 0 or more",
  ),
  "a state with a number in place of an array": (
    lambda: gated_delta_rule(q, k, v, g, beta, state=STATE._replace(memory=0)),
    TypeError,
    "gated_delta_rule: state.memory is of type int, no array",
  ),
  "less room than tokens": (
    lambda: softmax_attention(q, k, v, length=2),
    ValueError,
    "softmax_attention: the state has room for 2 tokens; 3 more need length=3"
    " in the first call",
  ),
  "an unknown size": (
    lambda: gated_delta_rule.init_state(batch=2, heads=4, key_dims=5),
    TypeError,
    "gated_delta_rule: init_state has no argument 'key_dims'; beside spec and"
    " dtype it takes batch, heads, key_dim, value_dim",
  ),
  "a size that is no count": (
    lambda: gated_delta_rule.init_state(
      batch=2.0, heads=4, key_dim=5, value_dim=7
    ),
    ValueError,
    "gated_delta_rule: batch=2.0 must be an integer, 0 or more",
  ),
  "an initial memory of another shape": (
    lambda: lattice.init_state(
      batch=2, heads=4, value_dim=7, memory=jnp.ones(3)
    ),
    ValueError,
    "an initial value has shape (3,), expected (4, 7, 64) (heads first) or what"
    " broadcasts to it",
  ),
  "a dtype that is none": (
    lambda: gated_delta_rule.init_state(
      batch=2, heads=4, key_dim=5, value_dim=7, dtype=jnp.int32
    ),
    ValueError,
    "dtype=int32: states need at least float32",
  ),
  "a state that is not fresh": (
    lambda: gated_delta_rule(
      q,
      k,
      v,
      g,
      beta,
      state=STATE._replace(segment_id=jnp.ones(2, jnp.int32)),
      segment_ids=ids,
      max_position=0,
    ),
    ValueError,
    "gated_delta_rule: max_position=0 says that the state is fresh, but it has"
    " seen tokens; give reset_state",
  ),
  "a state of longer chunks": (
    lambda: lattice(q, k, v, g=g, write_rate=beta, chunk_size=2, state=LATE),
    ValueError,
    "lattice: state is 3 tokens into its chunk, and chunk_size=2; give the spec"
    " that made it",
  ),
  "a reset state of longer chunks": (
    lambda: lattice(
      q,
      k,
      v,
      g=g,
      write_rate=beta,
      chunk_size=2,
      state=SLOTS,
      segment_ids=ids,
      reset_state=LATE,
    ),
    ValueError,
    "lattice: reset_state is 3 tokens into its chunk, and chunk_size=2; give"
    " the spec that made it",
  ),
  "a layer in place of layers": (
    lambda: ttt(
      q, k, k, eta=beta, layers=(jnp.ones((4, 5, 5)), jnp.ones((4, 5)))
    ),
    ValueError,
    "layers must be 1 of (weight, bias), as model='linear' has",
  ),
  "a word for a number": (
    lambda: gated_delta_rule(q, k, v, g, beta, scale="1"),
    TypeError,
    "gated_delta_rule: scale='1' is of type str, expected float or None",
  ),
  "a fraction for a count": (
    lambda: linear_attention(q, k, v, normalize=1.5),
    TypeError,
    "linear_attention: normalize=1.5 is of type float, expected bool",
  ),
  "an array for a state": (
    lambda: gated_delta_rule(q, k, v, g, beta, state=STATE.memory),
    TypeError,
    "gated_delta_rule: state is of type ArrayImpl; make it by"
    " gated_delta_rule.init_state(...)",
  ),
  "another op's reset state": (
    lambda: gated_delta_rule(
      q,
      k,
      v,
      g,
      beta,
      state=STATE,
      segment_ids=ids,
      reset_state=linear_attention.init_state(
        batch=2, heads=2, key_dim=4, value_dim=4
      ),
    ),
    TypeError,
    "gated_delta_rule: reset_state is of type"
    " memcomp_kernels.linear_attention.reference.State; make it by"
    " gated_delta_rule.init_state(...)",
  ),
}

# Calls that read what their arrays hold.
OF_VALUES = (
  "a bound that does not hold",
  "a bound that does not hold for the reset state",
  "no room for the segment that the state began",
  "no room for the segments that a state begins",
  "a reset state of another batch",
  "a state that is not fresh",
  "a state of longer chunks",
  "a reset state of longer chunks",
)


@pytest.mark.parametrize("name", ERRORS)
def test_one_line(name):
  call, kind, text = ERRORS[name]
  with pytest.raises(kind) as raised:
    call() if name in OF_VALUES else jax.eval_shape(call)
  assert str(raised.value) == text


@pytest.mark.parametrize("name", memories.MEMORIES)
def test_a_spec_checks_the_types_of_its_fields(name):
  op = memories.MEMORIES[name].op
  field = dataclasses.fields(op.Spec)[0].name
  with pytest.raises(TypeError, match=rf"^{field}=\[1\] is of type list, exp"):
    op.Spec(**{field: [1]})
  assert op.Spec() == op.Spec() != 0
  assert hash(op.Spec()) == hash(op.Spec())


@pytest.mark.parametrize("x", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
  ("name", "field"),
  [
    (name, field.name)
    for name, memory in memories.MEMORIES.items()
    for field in dataclasses.fields(memory.op.Spec)
    if field.type in (float, float | None)
  ],
)
def test_a_spec_takes_finite_numbers(name, field, x):
  with pytest.raises(ValueError, match=f"^{field}={x} must be finite"):
    memories.MEMORIES[name].op.Spec(**{field: x})


NUMBERS = (int, float, int | None, float | None)


@pytest.mark.parametrize("name", memories.MEMORIES)
def test_a_spec_checks_the_ranges_of_its_fields(name):
  """No size, eps or factor may be negative, and a word is one of a list."""
  Spec = memories.MEMORIES[name].op.Spec
  for field in dataclasses.fields(Spec):
    if field.type in NUMBERS:
      with pytest.raises(ValueError, match=rf"^{field.name}=-1 must"):
        Spec(**{field.name: -1})
    elif field.type is str:
      with pytest.raises(
        ValueError, match=rf"^{field.name}='\?' is not one of: "
      ):
        Spec(**{field.name: "?"})


def test_the_most_rows_of_a_dictionary():
  """Its square is still an int32: floor(t N / (t + N)) is right."""
  most = 46_340
  with pytest.raises(ValueError, match="max_rows=46341 must be at most 46340"):
    ovq.Spec(max_rows=most + 1)
  rows = jax.jit(ovq.Spec(max_rows=most).rows)(jnp.int32(100_000))
  assert int(rows) == 100_000 * most // (100_000 + most)
