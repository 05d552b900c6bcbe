"""A memory of one's own, in one file, under the contract of all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_memory import Inputs, Spec, State, scalar_gla

from memcomp_kernels.testing import checks, memory, packed_checks, subjects


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  del spec
  keys = jax.random.split(key, 4)
  sizes = (key_dim, key_dim, value_dim, 1)
  drawn = [
    jax.random.normal(k, (batch, time, heads, n))
    for k, n in zip(keys, sizes, strict=True)
  ]
  return Inputs(*drawn[:3], log_decay=jax.nn.log_sigmoid(3 + drawn[3]))


def _state(key, spec, *, batch, heads, key_dim, value_dim):
  del spec
  shape = batch, heads, key_dim, value_dim
  return State(jax.random.normal(key, shape), jnp.zeros(batch, jnp.int32))


IDS = np.array([[1] * 9 + [2] * 12 + [0] * 4 + [3] * 5, [1] * 20 + [4] * 10])
SUBJECT = subjects.Subject(
  memory.Memory(
    name="scalar_gla",
    op=scalar_gla,
    specs={"own": Spec(scale=0.5)},
    typical=("own",),
    make_inputs=_inputs,
    make_state=_state,
    edges=lambda inputs: {
      "forgets all": inputs._replace(log_decay=-1e4 + 0 * inputs.log_decay),
      "zero keys": inputs._replace(key=0 * inputs.key),
    },
  ),
  Spec(scale=0.5),
  "xla_chunked",
)


@pytest.mark.parametrize(
  ("check", "given"),
  [
    (checks.check_truth, (29,)),
    (checks.check_hand_off, (7, 3)),
    pytest.param(
      packed_checks.check_packed_against_reference,
      (IDS,),
      marks=pytest.mark.slow,
    ),
    (checks.check_edges, (29,)),
    (checks.check_strong_decays, (29, "float64")),
  ],
  ids=lambda x: getattr(x, "__name__", ""),
)
def test_it_keeps_the_contract(check, given):
  with jax.enable_x64(True):
    check(SUBJECT, *given)


def test_it_is_called_as_others_are():
  q = k = v = jnp.ones((1, 3, 2, 4))
  y, state = scalar_gla(q, k, v, g=jnp.zeros((1, 3, 2)))
  np.testing.assert_allclose(y[0, :, 0, 0], [4.0, 8.0, 12.0])
  assert state.memory.shape == (1, 2, 4, 4)
