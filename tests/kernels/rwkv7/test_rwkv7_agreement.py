"""RWKV-7 is what flash-linear-attention's definition computes.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import pytest
import rotation

from memcomp_kernels.rwkv7 import api


def rwkv7(function):
  def run(x):
    spec = api.Spec()
    state = api.init_state(
      spec,
      batch=x["query"].shape[0],
      heads=x["query"].shape[2],
      key_dim=x["key"].shape[-1],
      value_dim=x["value"].shape[-1],
    )
    state = state._replace(memory=x["memory"])
    inputs = api.Inputs(*(x[name] for name in api.Inputs._fields))
    state, p = function(state, inputs, spec=spec)
    return {"y": p, "memory": state.memory}

  return run


DEFINITIONS = {"rwkv7": rwkv7}


@pytest.mark.parametrize(
  "function", rotation.cases([api.reference, api.chunk], [api.reference])
)
def test_agrees(function):
  agreement.assert_agrees(agreement.DATA / "rwkv7.npz", rwkv7(function))
