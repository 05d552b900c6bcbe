"""What a call in one line refuses, in one line."""

import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest

import memcomp_kernels
from memcomp_kernels import (
  FRESH,
  delta_rule,
  gated_delta_rule,
  key_value_means,
  lattice,
  linear_attention,
  ovq,
  slot_attention,
  softmax_attention,
  ssd,
  tensor_cache,
  trellis,
  ttt,
)

q = k = jnp.zeros((2, 3, 4, 5))
v = jnp.zeros((2, 3, 4, 7))
g = beta = jnp.zeros((2, 3, 4))
ids = jnp.ones((2, 3), jnp.int32)
STATE = gated_delta_rule.init_state(batch=2, heads=4, key_dim=5, value_dim=7)

# name -> (call, exception, its text)
ERRORS = {
  "shape": (
    lambda: gated_delta_rule(q, k[..., :4], v, g, beta),
    ValueError,
    "gated_delta_rule: k has shape (2, 3, 4, 4), expected [batch=2, time=3,"
    " heads=4, key_dim=5]",
  ),
  "a state without the width of its keys": (
    lambda: key_value_means.init_state(batch=1, heads=1),
    ValueError,
    "key_value_means: key_dim is missing",
  ),
  "slots without the width of their values": (
    lambda: lattice.init_state(batch=1, heads=1),
    ValueError,
    "lattice: value_dim is missing",
  ),
  "a model without the width of its keys": (
    lambda: ttt.init_state(ttt.Spec(model="mlp"), batch=1, heads=1),
    ValueError,
    "test_time_training: key_dim is missing",
  ),
  "a length that is no count": (
    lambda: key_value_means.init_state(
      batch=1, heads=1, key_dim=8, value_dim=8, length=1e4
    ),
    ValueError,
    "key_value_means: length=10000.0 must be an integer, 0 or more",
  ),
  "a size that the spec has": (
    lambda: ovq.init_state(
      batch=1, heads=1, key_dim=8, value_dim=8, max_rows=5
    ),
    TypeError,
    "ovq: init_state has no argument 'max_rows'; beside spec and dtype it takes"
    " batch, heads, key_dim, value_dim",
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
  "segment ids beyond int32": (
    lambda: gated_delta_rule(
      q, k, v, g, beta, segment_ids=np.full((2, 3), 2**32)
    ),
    ValueError,
    "gated_delta_rule: segment_ids has numbers from 4294967296 to 4294967296,"
    " expected 0 to 2147483647: number documents from 1 on; 0 is"
    " padding",
  ),
  "listed segment ids beyond int32": (
    lambda: gated_delta_rule(q, k, v, g, beta, segment_ids=[[1, 2, -(2**32)]]),
    ValueError,
    "gated_delta_rule: segment_ids has numbers from -4294967296 to 2, expected 0"
    " to 2147483647: number documents from 1 on; 0 is padding",
  ),
  "padding as other libraries mark it": (
    lambda: gated_delta_rule(
      q, k, v, g, beta, segment_ids=np.full((2, 3), -100)
    ),
    ValueError,
    "gated_delta_rule: segment_ids has numbers from -100 to -100, expected 0 to"
    " 2147483647: number documents from 1 on; 0 is padding",
  ),
  "an implementation behind one that does": (
    lambda: gated_delta_rule(
      q, k, v, g, beta, implementation=("xla_chunked", "fast")
    ),
    NotImplementedError,
    "implementation 'fast' is unknown; choose from reference, xla_chunked,"
    " mosaic_tpu, library_tpu, mosaic_gpu, library_gpu",
  ),
  "an implementation that is no name": (
    lambda: gated_delta_rule(q, k, v, g, beta, implementation=1),
    TypeError,
    "gated_delta_rule: implementation=1 must be a name, or several",
  ),
  "no channels": (
    lambda: gated_delta_rule(q[..., :0], k[..., :0], v, g, beta),
    ValueError,
    "gated_delta_rule: q has shape (2, 3, 4, 0); key_dim must be at least 1",
  ),
  "an implementation": (
    lambda: gated_delta_rule(q, k, v, g, beta, implementation="fast"),
    NotImplementedError,
    "gated_delta_rule has no fast implementation; it has: reference, xla_chunked,"
    " mosaic_tpu, mosaic_gpu",
  ),
  "no implementation": (
    lambda: gated_delta_rule(q, k, v, g, beta, implementation=()),
    ValueError,
    "gated_delta_rule: implementation=() names none; leave it out for the default",
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
  "a tuple for inputs": (
    lambda: gated_delta_rule.chunk(
      STATE, (q, k, v, g, beta), spec=gated_delta_rule.Spec()
    ),
    TypeError,
    "gated_delta_rule: inputs is of type tuple; make it by"
    " gated_delta_rule.Inputs(...)",
  ),
  "a tiling of what has none": (
    lambda: softmax_attention.chunk(
      softmax_attention(q, k, v)[1],
      softmax_attention.Inputs(q, k, v),
      spec=softmax_attention.Spec(),
      tiling=16,
    ),
    TypeError,
    "softmax_attention: it has no tiling; leave it out",
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


@pytest.mark.parametrize("name", ERRORS)
def test_one_line(name):
  call, kind, text = ERRORS[name]
  with pytest.raises(kind) as raised:
    jax.eval_shape(call)
  assert str(raised.value) == text


def test_a_number_for_a_tiling():
  case = op_cases.CASES["trellis"]
  call = {"spec": case.spec, "tiling": 16}
  with pytest.raises(TypeError) as raised:
    case.op.chunk(case.fresh(), case.inputs(), **call)
  assert str(raised.value) == (
    "trellis: tiling is of type int; make it by trellis.Tiling(...)"
  )


def test_sizes_of_numpy_and_no_tokens():
  """What is right is not refused."""
  cache = {"g": g, "write_rate": beta}

  def states_and_nothing():
    none = (x[:, :0] for x in (q, k, v))
    return [
      tensor_cache(q, k, v, **cache, window_size=size)[1]
      for size in (2, np.int64(2))
    ], softmax_attention(*none)[0]

  (expected, found), nothing = jax.eval_shape(states_and_nothing)
  assert found == expected
  assert nothing.shape == (2, 0, 4, 7)


def test_a_saved_state_and_no_tokens():
  """What comes back is an array of JAX, as from every other call."""
  state = gated_delta_rule.init_state(batch=2, heads=4, key_dim=5, value_dim=7)
  none = [x[:, :0] for x in (q, k, v, g, beta)]
  _, after = gated_delta_rule(*none, state=jax.device_get(state))
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(after))


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
