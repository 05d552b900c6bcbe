"""Each pass is FLA's gated delta rule, by what docs/agreement.md says."""

import agreement
import pytest
import rotation

from memcomp_kernels import two_pass_delta


def two_pass(function):
  def run(x):
    state = two_pass_delta.init_state(
      two_pass_delta.Spec(),
      batch=x["query"].shape[0],
      heads=x["query"].shape[2],
      key_dim=x["key"].shape[-1],
      value_dim=x["value"].shape[-1],
    )
    state = state._replace(
      key_memory=x["key_memory"], value_memory=x["value_memory"]
    )
    names = two_pass_delta.Inputs._fields[:-1]
    inputs = two_pass_delta.Inputs(*(x[name] for name in names))
    state, y = function(state, inputs, spec=two_pass_delta.Spec())
    return {
      "y": y,
      "key_memory": state.key_memory,
      "value_memory": state.value_memory,
    }

  return run


DEFINITIONS = {"two_pass_delta": two_pass}


@pytest.mark.parametrize(
  "function",
  rotation.cases(
    [two_pass_delta.reference, two_pass_delta.chunk], [two_pass_delta.reference]
  ),
)
def test_agrees(function):
  path = agreement.DATA / "two_pass_delta.npz"
  agreement.assert_agrees(path, two_pass(function))
