"""State space duality is what the authors' minimal listing computes.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import jax
import jax.numpy as jnp
import pytest
import rotation

from memcomp_kernels import state_space_duality


def definition(function):
  def run(x):
    batch, heads, key_dim, value_dim = x["memory"].shape
    spec = state_space_duality.Spec(heads_per_group=heads)
    state = state_space_duality.init_state(
      spec, batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    step = jax.nn.softplus(x["step"])[..., None]
    inputs = state_space_duality.Inputs(
      query=x["query"],
      key=x["key"],
      value=x["value"],
      log_decay=-step * jnp.exp(x["rate_log"])[:, None],
      write_rate=step,
      skip=jnp.broadcast_to(x["skip"][:, None], step.shape),
    )
    state, y = function(state._replace(memory=x["memory"]), inputs, spec=spec)
    return {"y": y, "memory": state.memory}

  return run


@pytest.mark.parametrize(
  "function",
  rotation.cases(
    [state_space_duality.reference, state_space_duality.chunk],
    [state_space_duality.reference],
  ),
)
def test_agrees(function):
  path = agreement.DATA / "state_space.npz"
  agreement.assert_agrees(path, definition(function))
