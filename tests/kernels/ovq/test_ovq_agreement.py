"""Online vector quantisation is what the released code computes.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import pytest
import rotation

from memcomp_kernels.ovq import api


def ovq(function):
  def run(x):
    batch, time, heads, dim = x["query"].shape
    # Of torch_definitions.py: small and large.
    spec = api.Spec(chunk_size=time // 4, max_rows={20: 7, 96: 49}[time])
    state = api.init_state(
      spec, batch=batch, heads=heads, key_dim=dim, value_dim=dim
    )
    query = x["query"] * x["beta"][:, None] * dim**0.5
    inputs = api.Inputs(query, x["key"], x["value"])
    state, y = function(state, inputs, spec=spec)
    return {
      "y": y,
      "keys": state.keys,
      "values": state.values,
      "counts": state.counts,
    }

  return run


DEFINITIONS = {"ovq": ovq}


@pytest.mark.parametrize(
  "function", rotation.cases([api.reference, api.chunk], [api.reference])
)
def test_agrees(function):
  agreement.assert_agrees(agreement.DATA / "ovq.npz", ovq(function))
