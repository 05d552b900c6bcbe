"""Softmax attention whose query heads share keys and values, by groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from jax.sharding import Mesh

from memcomp_kernels import softmax_attention
from memcomp_kernels.parallel import shard
from memcomp_kernels.testing import (
  checks,
  errors,
  gradients,
  memories,
  packed_checks,
  subjects,
  tolerances,
)

ONE = memories.MEMORIES["softmax_attention"]
GROUP = 3


def grouped_inputs(key, spec, *, heads, **sizes):
  """Keys and values of `heads` heads, queries of three times as many."""
  few = ONE.make_inputs(key, spec, heads=heads, **sizes)
  many = ONE.make_inputs(key, spec, heads=GROUP * heads, **sizes)
  return few._replace(query=many.query, sink_query=many.sink_query)


GROUPED = dataclasses.replace(ONE, make_inputs=grouped_inputs)


def subject(name, implementation="xla_chunked"):
  return subjects.Subject(GROUPED, GROUPED.specs[name], implementation)


@pytest.mark.parametrize(
  ("name", "implementation"),
  rotation.cases(
    [
      ("full", "reference"),
      ("full", "xla_chunked"),
      ("window-sinks", "xla_chunked"),
    ],
    [("full", "xla_chunked")],
  ),
)
def test_equals_repeated_keys_and_values(name, implementation):
  """Query head h reads head h // 3: values, gradients and final state."""
  this = subject(name, implementation)

  def repeated(state, inputs):
    def repeat(x, axis):
      return jnp.repeat(x, GROUP, axis=axis)

    wide = state._replace(
      keys=repeat(state.keys, 1), values=repeat(state.values, 1)
    )
    inputs = inputs._replace(
      key=repeat(inputs.key, 2), value=repeat(inputs.value, 2)
    )
    final, y = softmax_attention.reference(wide, inputs, spec=this.spec)
    # The first of each group: their cotangents are those of the narrow state.
    return final._replace(
      keys=final.keys[:, ::GROUP], values=final.values[:, ::GROUP]
    ), y

  with jax.enable_x64(True):
    arguments = this.state(), this.inputs(37)
    subjects.assert_agree(
      gradients.value_and_gradients(this.chunk, arguments),
      gradients.value_and_gradients(repeated, arguments),
      "grouped",
    )


@pytest.mark.slow
def test_keeps_the_contract():
  checks.check_hand_off(subject("full"), piece=5, pieces=3)
  packed_checks.check_packing(subject("window-sinks"), [3, 12], 2)


def test_heads_that_do_not_divide():
  state, inputs = subject("full").state(), subject("full").inputs(4)
  with pytest.raises(ValueError, match="5 heads, not a multiple of the 2"):
    softmax_attention.chunk(
      state,
      inputs._replace(query=inputs.query[:, :, :5]),
      spec=softmax_attention.Spec(),
    )
  with pytest.raises(
    ValueError, match="sink_query is given, but sink_tokens=0"
  ):
    softmax_attention.chunk(
      state,
      inputs._replace(sink_query=inputs.query),
      spec=softmax_attention.Spec(),
    )
  with pytest.raises(ValueError, match=r"key has shape .* expected"):
    softmax_attention.chunk(
      state, inputs._replace(key=inputs.query), spec=softmax_attention.Spec()
    )


@pytest.mark.slow
def test_heads_over_devices():
  """A device's queries read the keys and values that it has."""
  this = subject("full")
  arguments = this.state(), this.inputs(20)
  chunk = shard.shard_chunk(
    this.chunk, batch_axes=("fsdp",), head_axes=("tensor",)
  )
  expected = gradients.value_and_gradients(this.chunk, arguments)
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  with jax.set_mesh(Mesh(devices, ("fsdp", "tensor"))):
    actual = gradients.value_and_gradients(chunk, arguments)
  errors.assert_close(actual, expected, tolerances.SHARDED, "sharded")
