"""Libraries' kernels of softmax attention against the XLA form, on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.primitives.mosaic import modes
from memcomp_kernels.softmax_attention import (
  api,
)
from memcomp_kernels.testing import checks, memories

MEMORY = memories.MEMORIES["softmax_attention"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 64, "value_dim": 64}


def arguments(spec, time, *, group=1, length=300, dtype="float32", **sizes):
  """A fresh state, and inputs with `group` times as many query heads."""
  sizes = SIZES | sizes
  wide = sizes | {"heads": group * sizes["heads"]}
  inputs, many = (
    MEMORY.make_inputs(jax.random.key(0), spec, time=time, **s)
    for s in (sizes, wide)
  )
  inputs = inputs._replace(query=many.query)
  state = api.init_state(spec, length=length, **sizes)
  return state, checks.cast(inputs, dtype)


def run(implementation, spec, arguments, segment_ids=None):
  function = functools.partial(
    api.chunk,
    spec=spec,
    segment_ids=segment_ids,
    implementation=implementation,
    seen=0,
  )
  return checks.value_and_gradients(function, arguments)


def packed(time):
  """Ids that come again, padding inside segments and around them."""
  ids = np.zeros((2, time), np.int32)
  ids[0, : time // 3], ids[0, time // 3 :] = 7, 3
  ids[1, 5:40], ids[1, 50:90], ids[1, 90:95], ids[1, 97 : time - 9] = 1, 1, 2, 1
  return jnp.asarray(ids)


CASES = {
  "full": (api.Spec(), 150, {}),
  "full, packed": (api.Spec(), 150, {"ids": packed}),
  "full, more than it holds": (api.Spec(), 150, {"length": 90}),
  "window": (api.Spec(window_size=70, scale=0.2), 290, {"group": 3}),
  "window, packed": (
    api.Spec(window_size=70),
    290,
    {"ids": packed, "group": 2},
  ),
  "sinks": (api.Spec(window_size=70, sink_tokens=5), 290, {}),
  "sinks of a short row, packed": (
    api.Spec(window_size=200, sink_tokens=5),
    150,
    {"ids": packed},
  ),
  "blocks": (api.Spec(window_size=96, chunk_size=48), 290, {}),
  "widths": (api.Spec(), 140, {"key_dim": 128, "value_dim": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_tpu(name):
  spec, time, changes = CASES[name]
  ids = changes.get("ids", lambda time: None)(time)
  changes = {k: v for k, v in changes.items() if k != "ids"}
  given = arguments(spec, time, **changes)
  with modes.interpreted():
    found = run("library_tpu", spec, given, ids)
  checks.assert_agree(
    found, run("xla_chunked", spec, given, ids), name, "float32"
  )
