"""RWKV-7 is what flash-linear-attention's definition computes.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import pytest
import rotation

from memcomp_kernels import rwkv7 as rwkv7_op


def rwkv7(function):
  def run(x):
    spec = rwkv7_op.Spec()
    state = rwkv7_op.init_state(
      spec,
      batch=x["query"].shape[0],
      heads=x["query"].shape[2],
      key_dim=x["key"].shape[-1],
      value_dim=x["value"].shape[-1],
    )
    state = state._replace(memory=x["memory"])
    inputs = rwkv7_op.Inputs(*(x[name] for name in rwkv7_op.Inputs._fields))
    state, p = function(state, inputs, spec=spec)
    return {"y": p, "memory": state.memory}

  return run


DEFINITIONS = {"rwkv7": rwkv7}


@pytest.mark.parametrize(
  "function",
  rotation.cases([rwkv7_op.reference, rwkv7_op.chunk], [rwkv7_op.reference]),
)
def test_agrees(function):
  agreement.assert_agrees(agreement.DATA / "rwkv7.npz", rwkv7(function))
