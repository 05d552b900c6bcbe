"""What an implementation is chosen by."""

import types

import jax
import jax.numpy as jnp
import pytest

from memcomp_kernels import dispatch
from memcomp_kernels.pallas_gpu import tile_kernel as gpu
from memcomp_kernels.pallas_tpu import launch as tpu
from memcomp_kernels.testing import gradients, memories


def test_the_default_device():
  first, *others = jax.devices()
  assert dispatch.default_device() == first
  for chosen, expected in (("cpu", first), (others[2], others[2])):
    with jax.default_device(chosen):
      assert dispatch.default_device() == expected


def a_call():
  """One that the kernels of all platforms can do."""
  memory = memories.MEMORIES["state_space_duality"]
  spec = memory.op.Spec()
  sizes = {"batch": 1, "heads": 2, "key_dim": 64, "value_dim": 64}
  inputs = memory.make_inputs(jax.random.key(0), spec, time=8, **sizes)
  inputs = gradients.cast_operands(inputs, "bfloat16")
  state = memory.make_state(jax.random.key(1), spec, **sizes)
  call = dispatch.Call(state, inputs, spec, reset_state=state)
  return memory.op.implementations, call


@pytest.mark.parametrize(
  ("platform", "capability", "expected"),
  [
    ("cuda", "9.0", "mosaic_gpu"),
    ("cuda", "8.0", "xla_chunked"),
    ("rocm", "gfx942", "xla_chunked"),
    ("tpu", None, "mosaic_tpu"),
    ("cpu", None, "xla_chunked"),
  ],
)
def test_the_default_of_a_device(platform, capability, expected, monkeypatch):
  device = types.SimpleNamespace(
    platform=platform, compute_capability=capability, device_kind="made up"
  )
  monkeypatch.setattr(dispatch, "default_device", lambda: device)
  implementations, call = a_call()
  assert implementations.choose(None, call) == expected


@pytest.mark.parametrize("wide", ["state", "log_decay", "reset_state"])
@pytest.mark.parametrize(
  ("name", "kernels"), [("mosaic_gpu", gpu), ("mosaic_tpu", tpu)]
)
def test_kernels_have_no_float64(name, kernels, wide):
  implementations, call = a_call()
  state, inputs = call.state, call.inputs
  with jax.enable_x64(True), kernels.interpreted():
    assert implementations.unsupported(name, call) is None
    if wide == "log_decay":
      changed = inputs._replace(log_decay=inputs.log_decay.astype(jnp.float64))
      call = call._replace(inputs=changed)
    else:
      call = call._replace(**{wide: gradients.cast(state, jnp.float64)})
    assert implementations.unsupported(name, call) == "it has no float64"
    assert implementations.choose((name, "xla_chunked"), call) == "xla_chunked"
