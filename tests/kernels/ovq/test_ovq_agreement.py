"""Online vector quantisation is what the released code computes.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import pytest
import rotation

from memcomp_kernels import ovq as ovq_op


def ovq(function):
  def run(x):
    batch, time, heads, dim = x["query"].shape
    # Of torch_definitions.py: small and large.
    spec = ovq_op.Spec(chunk_size=time // 4, max_rows={20: 7, 96: 49}[time])
    state = ovq_op.init_state(
      spec, batch=batch, heads=heads, key_dim=dim, value_dim=dim
    )
    query = x["query"] * x["beta"][:, None] * dim**0.5
    inputs = ovq_op.Inputs(query, x["key"], x["value"])
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
  "function",
  rotation.cases([ovq_op.reference, ovq_op.chunk], [ovq_op.reference]),
)
def test_agrees(function):
  agreement.assert_agrees(agreement.DATA / "ovq.npz", ovq(function))
