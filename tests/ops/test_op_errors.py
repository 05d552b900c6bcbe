"""What a call in one line refuses, in one line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memcomp_kernels
from memcomp_kernels import (
  FRESH,
  delta_rule,
  gated_delta_rule,
  key_value_means,
  lattice,
  linear_attention,
  slot_attention,
  softmax_attention,
  ssd,
  tensor_cache,
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

# name -> (call, exception, its text)
ERRORS = {
  "shape": (
    lambda: gated_delta_rule(q, k[..., :4], v, g, beta),
    ValueError,
    "gated_delta_rule: k has shape (2, 3, 4, 4), expected [batch=2, time=3,"
    " heads=4, key_dim=5]",
  ),
  "axes": (
    lambda: gated_delta_rule(q[0], k, v, g, beta),
    ValueError,
    "gated_delta_rule: q has shape (3, 4, 5), expected [batch=2, time=3,"
    " heads=4, key_dim=5]",
  ),
  "gate": (
    lambda: gated_delta_rule(q, k, v, g[:, :2], beta),
    ValueError,
    "gated_delta_rule: g has shape (2, 2, 4, 1), expected [batch=2, time=3,"
    " heads=4, 1]",
  ),
  "passes": (
    lambda: trellis(q, k, v, target=q, write_rate=q),
    ValueError,
    "trellis: write_rate has shape (2, 3, 4, 5), expected [batch=2, time=3,"
    " heads=4, 1 or 2]",
  ),
  "integers": (
    lambda: gated_delta_rule(q.astype(int), k, v, g, beta),
    ValueError,
    "gated_delta_rule: q has dtype int32, expected a floating dtype",
  ),
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
  "segment ids": (
    lambda: gated_delta_rule(q, k, v, g, beta, segment_ids=ids[:, :2]),
    ValueError,
    "gated_delta_rule: segment_ids has shape (2, 2), expected [batch=2,"
    " time=3]",
  ),
  "segment ids of another kind": (
    lambda: gated_delta_rule(q, k, v, g, beta, segment_ids=ids > 0),
    ValueError,
    "gated_delta_rule: segment_ids has dtype bool, expected an integer dtype",
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
  "two names": (
    lambda: gated_delta_rule(q, k, v, g, beta, log_decay=g),
    TypeError,
    "gated_delta_rule: log_decay is given twice",
  ),
  "missing": (
    lambda: gated_delta_rule(q, k, v),
    TypeError,
    "gated_delta_rule: missing g, beta",
  ),
  "unknown": (
    lambda: delta_rule(q, k, v, beta, cu_seqlens=ids),
    TypeError,
    "delta_rule: no argument 'cu_seqlens'; beside those of every call it takes"
    " q, k, v, beta, scale",
  ),
  "a fixed field": (
    lambda: delta_rule(q, k, v, beta, forget_gate=True),
    TypeError,
    "delta_rule: no argument 'forget_gate'; beside those of every call it takes"
    " q, k, v, beta, scale",
  ),
  "too many": (
    lambda: delta_rule(q, k, v, beta, g),
    TypeError,
    "delta_rule: 5 arrays by position; it takes q, k, v, beta so, and all"
    " others by keyword",
  ),
  "spec": (
    lambda: gated_delta_rule(q, k, v, g, beta, scale=0.0),
    ValueError,
    "scale=0.0 must be positive, or None",
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
  "an array of no use": (
    lambda: linear_attention(q, k, v, g, forget_gate=False),
    ValueError,
    "linear_attention: g is given, but forget_gate=False has no use for it",
  ),
  "neither": (
    lambda: slot_attention(q, k, v),
    TypeError,
    "slot_attention: missing g for rule='gated' or s for rule='softmax'",
  ),
  "heads of a group": (
    lambda: ssd(q, k, v, g, dt=beta, heads_per_group=3),
    ValueError,
    "state_space_duality: heads_per_group=3 must divide heads=4",
  ),
  "groups that do not divide": (
    lambda: ssd(q, k, v[:, :, :3], g[..., :3], dt=beta[..., :3]),
    ValueError,
    "state_space_duality: q has shape (2, 3, 4, 5), expected [batch=2, time=3,"
    " heads/heads_per_group=3, key_dim=5]",
  ),
  "an array that an option refuses": (
    lambda: ssd(q, k, v, g, dt=beta, D=beta, skip=False),
    ValueError,
    "state_space_duality: D is given, but skip=False has no use for it",
  ),
  "heads of queries": (
    lambda: softmax_attention(q[:, :, :3], k[:, :, :2], v[:, :, :2]),
    ValueError,
    "softmax_attention: query has 3 heads, not a multiple of the 2 heads of"
    " keys and values",
  ),
  "a bound that does not hold": (
    lambda: softmax_attention(
      q, k, v, state=softmax_attention(q, k, v, length=6)[1], max_position=2
    ),
    ValueError,
    "softmax_attention: the state has seen 3 tokens, more than the bound that"
    " was given for them, 2",
  ),
  "a bound that is no count": (
    lambda: gated_delta_rule(q, k, v, g, beta, state=STATE, max_position=1.5),
    ValueError,
    "gated_delta_rule: max_position=1.5 must be an integer, 0 or more",
  ),
  "a gate of another shape where the decay is left out": (
    lambda: delta_rule(q, k, v, beta[0]),
    ValueError,
    "delta_rule: beta has shape (3, 4), expected [batch=2, time=3, heads=4, 1]",
  ),
  "no array": (
    lambda: gated_delta_rule("q", k, v, g, beta),
    TypeError,
    "gated_delta_rule: q is of type str, expected an array of numbers",
  ),
  "a narrow dtype": (
    lambda: gated_delta_rule(q.astype("float8_e4m3fn"), k, v, g, beta),
    ValueError,
    "gated_delta_rule: q has dtype float8_e4m3fn, expected a floating dtype",
  ),
  "a state with a number in place of an array": (
    lambda: gated_delta_rule(q, k, v, g, beta, state=STATE._replace(memory=0)),
    TypeError,
    "gated_delta_rule: state.memory is of type int, no array",
  ),
  "segment ids beyond int32": (
    lambda: gated_delta_rule(
      q, k, v, g, beta, segment_ids=np.full((2, 3), 2**32)
    ),
    ValueError,
    "gated_delta_rule: segment_ids has numbers from 4294967296 to 4294967296,"
    " more than int32 holds; number the documents of a row from 1 on",
  ),
  "less room than tokens": (
    lambda: softmax_attention(q, k, v, length=2),
    ValueError,
    "softmax_attention: the state has room for 2 tokens; 3 more need length=3"
    " in the first call",
  ),
  "an implementation that is no name": (
    lambda: gated_delta_rule(q, k, v, g, beta, implementation=1),
    TypeError,
    "delta_rule: implementation=1 must be a name, or several",
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
    "lattice: the state is 3 tokens into its chunk, and chunk_size=2; give the"
    " spec that made the state",
  ),
  "no channels": (
    lambda: gated_delta_rule(q[..., :0], k[..., :0], v, g, beta),
    ValueError,
    "gated_delta_rule: q has shape (2, 3, 4, 0); key_dim must be at least 1",
  ),
  "an implementation": (
    lambda: gated_delta_rule(q, k, v, g, beta, implementation="fast"),
    NotImplementedError,
    "delta_rule has no fast implementation; it has: reference, xla_chunked,"
    " mosaic_tpu, mosaic_gpu",
  ),
  "no implementation": (
    lambda: gated_delta_rule(q, k, v, g, beta, implementation=()),
    ValueError,
    "delta_rule: implementation=() names none; leave it out for the default",
  ),
  "what is missing, not what is unread": (
    lambda: delta_rule(q, k, v),
    TypeError,
    "delta_rule: missing beta",
  ),
  "two of which one is meant": (
    lambda: slot_attention(q, k, v, g=q, s=q),
    TypeError,
    "slot_attention: give one alone: g for rule='gated', s for rule='softmax'",
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
  "a tuple for inputs": (
    lambda: gated_delta_rule.chunk(
      STATE, (q, k, v, g, beta), spec=gated_delta_rule.Spec()
    ),
    TypeError,
    "gated_delta_rule: inputs is of type tuple; make it by"
    " gated_delta_rule.Inputs(...)",
  ),
  "an implementation that there is not": (
    lambda: ttt(q, k, q, eta=beta, implementation="mosaic_tpu"),
    NotImplementedError,
    "test_time_training has no mosaic_tpu implementation; it has: reference,"
    " xla_chunked",
  ),
  "implementations": (
    lambda: key_value_means(
      q,
      k,
      v,
      merge_gate=g,
      rotary_dim=0,
      length=8,
      chunk_size=4,
      implementation=("mosaic_tpu", "mosaic_gpu"),
    ),
    NotImplementedError,
    "key_value_means: no implementation that was named can do this call:"
    " mosaic_tpu (it is a TPU kernel, and the devices in use are of cpu);"
    " mosaic_gpu (there is none)",
  ),
}


# Calls that read what their arrays hold.
OF_VALUES = (
  "a bound that does not hold",
  "a state that is not fresh",
  "a state of longer chunks",
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


def test_sizes_of_numpy_and_no_tokens():
  """What is right is not refused."""
  cache = {"g": g, "write_rate": beta}
  _, expected = tensor_cache(q, k, v, **cache, window_size=2)
  _, found = tensor_cache(q, k, v, **cache, window_size=np.int64(2))
  assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
  none = (x[:, :0] for x in (q, k, v))
  assert softmax_attention(*none)[0].shape == (2, 0, 4, 7)


def test_what_the_ops_ask_for_is_asked_by_chunk_as_well():
  inputs = gated_delta_rule.Inputs(q, k, v, g[..., None], beta[..., None])
  call = {"spec": gated_delta_rule.Spec(), "segment_ids": ids}
  for form in (gated_delta_rule.chunk, gated_delta_rule.reference):
    with pytest.raises(ValueError, match="need reset_state"):
      jax.eval_shape(lambda form=form: form(STATE, inputs, **call))
    # A state that is said to be fresh is what new segments start from.
    jax.eval_shape(
      lambda form=form: form(STATE, inputs, **call, max_position=0)
    )
    jax.eval_shape(
      lambda form=form: form(STATE, inputs, **call, reset_state=FRESH)
    )
  assert memcomp_kernels.FRESH is FRESH
