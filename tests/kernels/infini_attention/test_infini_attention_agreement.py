"""Infini-attention's memory is what a public definition computes.

docs/agreement.md has which, and errors at other sizes.
"""

import agreement
import jax
import jax.numpy as jnp
import pytest
import rotation

from memcomp_kernels import infini_attention
from memcomp_kernels.infini_attention import reference

SPECS = {
  "infini": infini_attention.Spec(segment_size=8, eps=1e-10),
  "infini_linear": infini_attention.Spec(
    segment_size=8, window_size=5, rule="linear", eps=1e-10
  ),
  "infini_token": infini_attention.Spec(
    segment_size=1, window_size=5, eps=1e-10
  ),
}


def definition(function, spec):
  def run(x):
    batch, heads, key_dim, value_dim = x["memory"].shape
    state = infini_attention.init_state(
      spec, batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    written = reference.Association(x["memory"], x["normalizer"])
    state = state._replace(
      association=written, start=None if state.start is None else written
    )
    shape = (*x["query"].shape[:3], 1)
    gate = jax.nn.sigmoid(x["gate_logit"])[:, None]
    inputs = infini_attention.Inputs(
      query=x["query"],
      key=x["key"],
      value=x["value"],
      read_gate=jnp.broadcast_to(gate, shape),
      memory_query=x["memory_query"],
      memory_key=x["memory_key"],
    )
    state, y = function(state, inputs, spec=spec)
    return {"y": y, **state.association._asdict()}

  return run


@pytest.mark.parametrize(
  "function",
  rotation.cases(
    [infini_attention.reference, infini_attention.chunk],
    [infini_attention.reference],
  ),
)
@pytest.mark.parametrize("name", SPECS)
def test_agrees(name, function):
  path = agreement.DATA / f"{name}.npz"
  agreement.assert_agrees(path, definition(function, SPECS[name]))
