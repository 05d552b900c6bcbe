"""The delta rule is what flash-linear-attention's definitions compute.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import jax.numpy as jnp
import pytest
import rotation

from memcomp_kernels import delta_rule


def definition(function, gated):
  def run(x):
    batch, heads, key_dim, value_dim = x["memory"].shape
    spec = delta_rule.Spec(forget_gate=gated)
    state = delta_rule.init_state(
      spec, batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    rate = x["write_rate"]
    inputs = delta_rule.Inputs(
      query=x["query"],
      key=x["key"],
      value=x["value"],
      log_decay=x["log_decay"] if gated else jnp.zeros_like(rate),
      write_rate=rate,
    )
    state, y = function(state._replace(memory=x["memory"]), inputs, spec=spec)
    return {"y": y, "memory": state.memory}

  return run


@pytest.mark.parametrize(
  "function",
  rotation.cases(
    [delta_rule.reference, delta_rule.chunk], [delta_rule.reference]
  ),
)
@pytest.mark.parametrize("name", ["delta", "gated_delta"])
def test_agrees(name, function):
  path = agreement.DATA / f"{name}.npz"
  gated = name == "gated_delta"
  agreement.assert_agrees(path, definition(function, gated))
