"""Dtypes that meet in one call of an op: the widest is computed in."""

import jax
import jax.numpy as jnp
import pytest
import rotation

import memcomp_kernels
from memcomp_kernels.testing import errors, memories

# They mix both in one operation.
MIXING = [
  ("trellis", "chunk-ln_silu"),
  ("rwkv7", "released"),
  ("infini_attention", "token"),
]


def test_float16_has_the_range_of_float32_inside():
  """The state here is more than float16 holds; what is read of it is less."""
  op, q = memcomp_kernels.gated_delta_rule, jnp.full((1, 2, 1, 3), 0.1)
  q, gate = q.astype(jnp.float16), jnp.ones((1, 2, 1))
  state = op.init_state(batch=1, heads=1, key_dim=3, value_dim=3)
  state = state._replace(memory=jnp.full_like(state.memory, 2e5))
  (y, after), (expected, known) = jax.jit(
    lambda: [
      op(q, q, q, g=-gate, beta=gate, state=state, implementation=form)
      for form in (None, "reference")
    ]
  )()
  assert y.dtype == jnp.float16
  errors.assert_close(y, expected, 2e-3, "y")
  errors.assert_close(after, known, 1e-5, "state")


@pytest.mark.parametrize(
  "name", rotation.cases(memories.MEMORIES, ["delta_rule"])
)
@pytest.mark.parametrize("wide", ["inputs", "state"])
def test_one_part_in_float64_makes_the_call_float64(name, wide):
  """The state keeps its dtype, as a scan over calls needs."""
  memory = memories.MEMORIES[name]
  spec = memory.specs[memory.typical[0]]
  sizes = {"batch": 1, "heads": 2, "key_dim": 4, "value_dim": 4}
  with jax.enable_x64(True):
    key = jax.random.key(0)
    inputs = memory.make_inputs(key, spec, time=5, **sizes)
    state = memory.make_state(key, spec, **sizes)
    call = {"inputs": inputs, "state": state}
    narrow = "state" if wide == "inputs" else "inputs"
    # Both have numbers that float32 holds.
    call = jax.tree.map(_rounded, call)

    @jax.jit
    def chunk(call):
      return memory.op.chunk(**call, spec=spec, implementation="xla_chunked")

    _, expected = chunk(call)
    call[narrow] = jax.tree.map(_as_float32, call[narrow])
    after, y = chunk(call)
    errors.assert_equal(
      y.astype(jnp.float32), expected.astype(jnp.float32), "y"
    )
    assert y.dtype == call["inputs"].query.dtype
    dtypes = [x.dtype for x in jax.tree.leaves(call["state"])]
    assert [x.dtype for x in jax.tree.leaves(after)] == dtypes


@pytest.mark.parametrize(
  ("name", "spec"),
  rotation.cases(
    [(name, x) for name, m in memories.MEMORIES.items() for x in m.specs],
    MIXING,
  ),
)
def test_bfloat16_beside_float64(name, spec):
  """Gates that NumPy has made in float64, and all else in bfloat16."""
  memory = memories.MEMORIES[name]
  spec = memory.specs[spec]
  sizes = {"batch": 1, "heads": 2, "key_dim": 4, "value_dim": 4}
  with jax.enable_x64(True):

    def drawn():
      key = jax.random.key(0)
      inputs = memory.make_inputs(key, spec, time=5, **sizes)
      products = ("query", "key", "value")
      narrow = {n: getattr(inputs, n).astype(jnp.bfloat16) for n in products}
      return inputs._replace(**narrow), memory.make_state(key, spec, **sizes)

    inputs, state = jax.eval_shape(drawn)  # only traced below

    def loss(inputs, state):
      form = {"implementation": "xla_chunked"}
      _, y = memory.op.chunk(state, inputs, spec=spec, **form)
      assert y.dtype == jnp.bfloat16
      return jnp.sum(y.astype(jnp.float32))

    jax.eval_shape(jax.grad(loss, allow_int=True), inputs, state)


def _as_float32(x):
  return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


def _rounded(x):
  return _as_float32(x).astype(x.dtype)
