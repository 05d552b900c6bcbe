"""Trellis's TPU kernels with gradients per token, against the XLA form."""

import dataclasses
import itertools

import interpreter
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import rotation
import test_trellis_mosaic_tpu as stale

from memcomp_kernels import trellis
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import errors, gradients, tolerances

SPEC = trellis.Spec(num_slots=16, gradient_at="token")


def repeated(inputs):
  """The same key and value at every token, written at full rate."""
  return inputs._replace(
    key=jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape),
    value=jnp.broadcast_to(inputs.value[:, :1], inputs.value.shape),
    write_rate=jnp.ones_like(inputs.write_rate),
  )


CASES = {
  "l2_silu, two gates": ("l2", {}, {"passes": 2}),
  "silu, no forgetting": ("identity", {"forget_gate": False}, {}),
  "softmax, first order": ("silu", {"first_order": True}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_activations_and_options(case):
  read, changes, how = CASES[case]
  phi = case.split(",")[0]
  spec = dataclasses.replace(SPEC, phi=phi, read_activation=read, **changes)
  stale.assert_close(*stale.both(spec, stale.arguments(spec, 17, **how)))


@pytest.mark.slow
def test_learned_eps_and_two_registers():
  spec = dataclasses.replace(SPEC, num_slots=32, phi_eps=7.0)
  given = stale.arguments(spec, 16)
  assert given[2].log_phi_eps is not None
  stale.assert_close(*stale.both(spec, given))


@pytest.mark.slow
@rotation.both_parts
def test_repeated_keys(gradient):
  """Where a fixed number of sweeps is far off."""
  state, fresh, inputs = stale.arguments(SPEC, 32)
  given = state, fresh, repeated(inputs)
  stale.assert_close(*stale.both(SPEC, given, gradient=gradient))


@rotation.both_parts
def test_packing_and_memory_that_starts_as_nan(gradient):
  """Rows packed otherwise than each other, some of which forget all."""
  ids = np.zeros((3, 40), np.int32)
  ids[0] = 1
  ids[1, 5:13], ids[1, 13:14], ids[1, 20:] = 3, 4, 9
  ids[2, 2:12], ids[2, 14:20] = 1, 1
  state, fresh, inputs = stale.arguments(SPEC, 40, batch=3)
  forgets = inputs.log_decay.at[:, 3:30:9].set(-1e4)
  given = state, fresh, inputs._replace(log_decay=forgets)
  how = {"gradient": gradient} | interpreter.STRICT_TPU
  stale.assert_close(*stale.both(SPEC, given, jnp.asarray(ids), **how))


@pytest.mark.slow
def test_a_state_handed_on_inside_a_tile():
  state, _, inputs = stale.arguments(SPEC, 21)

  def run(cuts):
    carried, outputs = state, []
    for start, stop in itertools.pairwise(cuts):
      some = jax.tree.map(lambda x: x[:, start:stop], inputs)  # noqa: B023
      carried, y = trellis.chunk(
        carried, some, spec=SPEC, implementation="mosaic_tpu"
      )
      outputs.append(y)
    return carried, jnp.concatenate(outputs, axis=1)

  with launch.interpreted():
    errors.assert_close(
      run([0, 5, 21]), run([0, 21]), tolerances.VALUE["float32"], "handed on"
    )


@pytest.mark.slow
@rotation.both_parts
def test_bfloat16_is_no_worse_than_the_xla_form(gradient):
  given = stale.arguments(SPEC, 32, dtype="bfloat16")
  wide = gradients.cast(given, jnp.float32)
  truth = stale.run("xla_chunked", SPEC, wide, gradient=gradient)
  xla, kernel = stale.both(SPEC, given, gradient=gradient)
  stale.assert_no_worse(truth, xla, kernel)


@pytest.mark.slow  # The call is that of the other kernels.
def test_under_shard_map():
  """Rows and heads over a mesh: each device runs a kernel of its own."""
  state, fresh, inputs = stale.arguments(SPEC, 16, batch=2, heads=16)
  with launch.interpreted():
    alone, over = meshes.alone_and_over_a_mesh(
      trellis.chunk,
      (state, fresh, inputs),
      spec=SPEC,
      implementation="mosaic_tpu",
      differentiate=False,
      shape=(1, 2),
    )
  errors.assert_close(over, alone, tolerances.SHARDED, "sharded")


def test_what_cannot_be_done_says_why():
  state, _, inputs = stale.arguments(SPEC, 16)

  def chunk(spec=SPEC, inputs=inputs, state=state):
    return trellis.chunk(state, inputs, spec=spec, implementation="mosaic_tpu")

  with launch.interpreted():
    three = stale.arguments(SPEC, 16, heads=3)
    with pytest.raises(
      NotImplementedError, match="heads=3 must be a multiple of 8"
    ):
      chunk(inputs=three[2], state=three[0])
    read_out = dataclasses.replace(SPEC, value_readout_phi=True)
    with pytest.raises(NotImplementedError, match="value_readout_phi"):
      chunk(read_out)
