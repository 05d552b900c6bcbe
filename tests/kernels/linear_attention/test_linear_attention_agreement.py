"""Linear attention is what flash-linear-attention's definition computes.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import pytest
import rotation

from memcomp_kernels import linear_attention

SPECS = {
  "linear": linear_attention.Spec(eps=1e-10),
  "linear_no_sum": linear_attention.Spec(
    feature_map="identity", normalize=False
  ),
}


def definition(function, spec):
  def run(x):
    batch, heads, key_dim, value_dim = x["memory"].shape
    state = linear_attention.init_state(
      spec, batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    state = state._replace(memory=x["memory"], normalizer=x.get("normalizer"))
    inputs = linear_attention.Inputs(x["query"], x["key"], x["value"])
    state, y = function(state, inputs, spec=spec)
    found = {"y": y, "memory": state.memory}
    if state.normalizer is not None:
      found["normalizer"] = state.normalizer
    return found

  return run


@pytest.mark.parametrize(
  "function",
  rotation.cases(
    [linear_attention.reference, linear_attention.chunk],
    [linear_attention.reference],
  ),
)
@pytest.mark.parametrize("name", SPECS)
def test_agrees(name, function):
  path = agreement.DATA / f"{name}.npz"
  agreement.assert_agrees(path, definition(function, SPECS[name]))
