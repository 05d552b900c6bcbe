"""Kernels of affine tiles, interpreted, against the XLA forms.

Of the delta rule (which erases) and state space duality (whose heads share
keys), in tiles that kernels over tokens do not take, and of linear attention
(whose memory has one column more).
"""

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels.chunking import form
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import (
  errors,
  gradients,
  memories,
  tolerances,
)

SPECS = {
  "delta_rule": "gated",
  "state_space_duality": "shared",
  "linear_attention": "decayed",
}
TILES = {"delta_rule": 24, "state_space_duality": 24}
GATES = ("log_decay", "write_rate", "skip")


def arguments(name, time, *, dtype="float32", batch=1):
  """A state, another that segments start from, and inputs."""
  memory = memories.MEMORIES[name]
  spec = memory.specs[SPECS[name]]
  sizes = {"batch": batch, "heads": 4, "key_dim": 16, "value_dim": 8}
  inputs = memory.make_inputs(jax.random.key(0), spec, time=time, **sizes)
  inputs = inputs._replace(
    **{
      field: x.astype(dtype)
      for field, x in inputs._asdict().items()
      if field not in GATES and x is not None
    }
  )
  states = [memory.make_state(jax.random.key(i), spec, **sizes) for i in (1, 2)]
  return memory.op, spec, (*states, inputs)


def both(name, given, segment_ids=None, gradient=True, **mode):
  """Values and gradients of the XLA form and of the kernels."""
  _, spec, given = given
  functions = memories.MEMORIES[name].op.implementations.functions

  def run(chunk):
    def function(state, fresh, inputs):
      return chunk(
        state,
        inputs,
        spec=spec,
        segment_ids=segment_ids,
        reset_state=fresh,
        tiling=form.Tiling(tile_time=TILES.get(name, 16)),
      )

    return gradients.value_and_gradients(function, given, gradient=gradient)

  with launch.interpreted(**mode):
    return (
      run(programs.direct(functions["xla_chunked"])),
      run(programs.direct(functions["mosaic_tpu"])),
    )


def assert_close(expected, actual, dtype="float32"):
  bounds = tolerances.VALUE[dtype], tolerances.GRADIENT[dtype]
  for a, b, bound, part in zip(
    actual, expected, bounds, ("values", "gradients"), strict=True
  ):
    errors.assert_close(a, b, bound, part)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("time", [64, 75])
def test_equals_the_xla_form(name, time):
  assert_close(*both(name, arguments(name, time)))


# Of a memory that erases nothing; the delta rule's are in packed rows below.
def test_values_equal_the_xla_form_s():
  name = "linear_attention"
  assert_close(*both(name, arguments(name, 75), gradient=False))


@rotation.both_parts
@pytest.mark.parametrize("name", rotation.cases(SPECS, ["delta_rule"]))
def test_packing(name, gradient):
  """Strictly: memory starts as nan, races are looked for."""
  ids = np.zeros((3, 70), np.int32)
  ids[0] = 1  # goes on
  ids[1, 3:40], ids[1, 45:] = 5, 2
  ids[2, :20], ids[2, 20:32], ids[2, 32:60] = 1, 3, 4
  given = arguments(name, 70, batch=3)
  assert_close(
    *both(name, given, jnp.array(ids), gradient, **interpreter.STRICT_TPU)
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_is_no_worse_than_the_xla_form(name):
  given = arguments(name, 64, dtype="bfloat16")
  truth, _ = both(name, (*given[:2], gradients.cast(given[2], jnp.float32)))
  xla, kernel = both(name, given)
  errors.assert_no_worse(kernel, xla, truth)


def test_says_why_not():
  api, spec, (state, _, inputs) = arguments("delta_rule", 8)

  def chunk(inputs):
    return api.chunk(state, inputs, spec=spec, implementation="mosaic_tpu")

  with pytest.raises(NotImplementedError, match="devices in use are of cpu"):
    chunk(inputs)
  mixed = inputs._replace(key=inputs.key.astype("bfloat16"))
  with (
    launch.interpreted(),
    pytest.raises(NotImplementedError, match="must all be bfloat16"),
  ):
    chunk(mixed)
