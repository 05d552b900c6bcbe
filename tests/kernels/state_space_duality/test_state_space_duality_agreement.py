"""State space duality is what the authors' minimal listing computes.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import jax
import jax.numpy as jnp
import pytest
import rotation

from memcomp_kernels.state_space_duality import api


def definition(function):
  def run(x):
    batch, heads, key_dim, value_dim = x["memory"].shape
    spec = api.Spec(heads_per_group=heads)
    state = api.init_state(
      spec, batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    step = jax.nn.softplus(x["step"])[..., None]
    inputs = api.Inputs(
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
  "function", rotation.cases([api.reference, api.chunk], [api.reference])
)
def test_agrees(function):
  path = agreement.DATA / "state_space.npz"
  agreement.assert_agrees(path, definition(function))
