"""Slot attention is what flash-linear-attention's definitions compute.

docs/agreement.md has the commit, and errors at other sizes.
"""

import agreement
import pytest
import rotation

from memcomp_kernels import slot_attention


def gated(function):
  def run(x):
    (batch, _, heads, key_dim), value_dim = (
      x["query"].shape,
      x["value"].shape[-1],
    )
    spec = slot_attention.Spec(num_slots=x["log_decay"].shape[-1])
    state = slot_attention.init_state(
      spec, batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    state = state._replace(
      key_memory=x["key_memory"], value_memory=x["value_memory"]
    )
    inputs = slot_attention.Inputs(
      x["query"], x["key"], x["value"], x["log_decay"]
    )
    state, y = function(state, inputs, spec=spec)
    return {
      "y": y,
      "key_memory": state.key_memory,
      "value_memory": state.value_memory,
    }

  return run


def softmax(function):
  def run(x):
    (batch, _, heads, key_dim), value_dim = (
      x["query"].shape,
      x["value"].shape[-1],
    )
    spec = slot_attention.Spec(
      num_slots=x["write_logit"].shape[-1], rule="softmax", scale=None
    )
    state = slot_attention.init_state(
      spec, batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim
    )
    inputs = slot_attention.Inputs(
      x["query"], x["key"], x["value"], write_logit=x["write_logit"]
    )
    state, y = function(state, inputs, spec=spec)
    return {
      "y": y,
      "key_memory": state.key_memory,
      "value_memory": state.value_memory,
    }

  return run


DEFINITIONS = {"gsa": gated, "abc": softmax}


@pytest.mark.parametrize(
  "function",
  rotation.cases(
    [slot_attention.reference, slot_attention.chunk], [slot_attention.reference]
  ),
)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_agrees(name, function):
  path = agreement.DATA / f"slot_attention_{name}.npz"
  agreement.assert_agrees(path, DEFINITIONS[name](function))
