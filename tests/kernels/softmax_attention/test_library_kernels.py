"""Libraries' kernels of softmax attention against the XLA form, on a CPU."""

import copy
import functools
import logging
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation

from memcomp_kernels import derivative, dispatch, softmax_attention
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.softmax_attention import fresh, library_gpu
from memcomp_kernels.testing import errors, gradients, memories, subjects

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
  inputs = inputs._replace(query=many.query, sink_query=None)
  state = softmax_attention.init_state(spec, length=length, **sizes)
  return state, gradients.cast(inputs, dtype)


def run(implementation, spec, arguments, segment_ids=None):
  """Values, and gradients of all inputs and of the state."""
  function = functools.partial(
    softmax_attention.chunk,
    spec=spec,
    segment_ids=segment_ids,
    implementation=implementation,
    max_position=0,
  )
  return gradients.value_and_gradients(function, arguments)


def packed(time):
  """Ids that come again, padding inside segments and around them."""
  ids = np.zeros((2, time), np.int32)
  ids[0, : time // 3], ids[0, time // 3 :] = 7, 3
  ids[1, 5:40], ids[1, 50:90], ids[1, 90:95], ids[1, 97 : time - 9] = 1, 1, 2, 1
  return jnp.asarray(ids)


CASES = {
  "full": (softmax_attention.Spec(), 140, {"key_dim": 128}, False),
  "full, packed": (softmax_attention.Spec(), 150, {}, True),
  "full, more than it holds": (
    softmax_attention.Spec(),
    150,
    {"length": 90},
    False,
  ),
  "window": (
    softmax_attention.Spec(window_size=70, scale=0.2),
    290,
    {"group": 3},
    False,
  ),
  "window, packed": (
    softmax_attention.Spec(window_size=70),
    290,
    {"group": 2},
    True,
  ),
  "sinks": (
    softmax_attention.Spec(window_size=70, sink_tokens=5),
    290,
    {},
    False,
  ),
  "sinks of a short row, packed": (
    softmax_attention.Spec(window_size=200, sink_tokens=5),
    150,
    {},
    True,
  ),
  "blocks": (
    softmax_attention.Spec(window_size=96, chunk_size=48),
    290,
    {},
    False,
  ),
}


@pytest.mark.parametrize(
  "name",
  rotation.cases(CASES, ["full, packed"]),
)
def test_splash_equals_the_xla_form(name):
  spec, time, changes, with_ids = CASES[name]
  ids = packed(time) if with_ids else None
  given = arguments(spec, time, **changes)
  with launch.interpreted():
    found = run("library_tpu", spec, given, ids)
  expected = run("xla_chunked", spec, given, ids)
  subjects.assert_agree(found, expected, name, "float32")
  if ids is not None:
    padding = found[0][1][ids == 0]
    errors.assert_equal(padding, jnp.zeros_like(padding), "padding")


@pytest.mark.slow
def test_splash_in_bfloat16():
  """No worse than twice the XLA form, against float32."""
  spec = softmax_attention.Spec()
  given = arguments(spec, 128, dtype="bfloat16")
  exact = run("xla_chunked", spec, gradients.cast(given, "float32"))
  with launch.interpreted():
    found = run("library_tpu", spec, given)
  usual = run("xla_chunked", spec, given)
  assert found[0][1].dtype == jnp.bfloat16
  leaves = zip(*map(jax.tree.leaves, (found, usual, exact)), strict=True)
  for a, b, c in leaves:
    assert a.dtype == b.dtype
    bound = 2 * errors.relative_rms(b, c)
    assert errors.relative_rms(a, c) <= max(bound, 1e-6)


def test_splash_that_is_kept_runs_forward_once():
  spec = softmax_attention.Spec()
  state, inputs = arguments(spec, 128, length=128)
  kept = jax.checkpoint_policies.save_only_these_names(derivative.SAVED)

  def forwards(policy):
    @functools.partial(jax.checkpoint, policy=policy)
    def outputs(inputs):
      return softmax_attention.chunk(
        state, inputs, spec=spec, implementation="library_tpu", max_position=0
      )[1]

    def loss(inputs):
      return jnp.sum(jnp.square(outputs(inputs)))

    with launch.interpreted():
      jaxpr = jax.make_jaxpr(jax.grad(loss))(inputs)
    return str(jaxpr).count("name=splash_mha_fwd_residuals")

  assert (forwards(kept), forwards(None)) == (1, 2)


# Of cuDNN: what it can do, with the arguments that it gets.
CUDNN = ["full", "full, more than it holds", "window"]


@pytest.mark.parametrize("name", rotation.cases(CUDNN, ["window"]))
def test_cudnn_s_arguments_equal_the_xla_form(name, monkeypatch):
  """Through the same function of JAX, which has a form for the CPU."""
  spec, time, changes, _ = CASES[name]
  attend = functools.partial(library_gpu.attend, implementation="xla")

  monkeypatch.setattr(library_gpu, "unsupported", lambda call: None)
  monkeypatch.setattr(library_gpu, "chunk", fresh.implementation(attend))
  given = arguments(spec, time, **(changes | {"key_dim": 64}))
  subjects.assert_agree(
    run("library_gpu", spec, given),
    run("xla_chunked", spec, given),
    name,
    "float32",
  )


def call(
  spec=None,
  *,
  max_position=0,
  ids=None,
  reset=False,
  sinks_of_window=False,
  **changes,
):
  """What `unsupported` is asked about: shapes."""
  spec = spec or softmax_attention.Spec()
  state, inputs = jax.eval_shape(
    lambda: arguments(spec, 290, **({"dtype": "bfloat16"} | changes))
  )
  if sinks_of_window:
    inputs = inputs._replace(sink_query=inputs.query)
  reset = state if reset else None
  return dispatch.Call(state, inputs, spec, ids, reset, max_position)


IDS = np.ones((2, 290), np.int32)
SINKS = softmax_attention.Spec(window_size=70, sink_tokens=5)
BLOCKS = softmax_attention.Spec(window_size=96, chunk_size=48)


# (options of `call`, why not on a TPU, why not on a GPU), None where it can.
LIMITS = {
  "fresh": (dict(), None, None),
  "grouped window": (
    dict(spec=softmax_attention.Spec(window_size=70), group=2),
    None,
    None,
  ),
  "not known to be fresh": (
    dict(max_position=None),
    "give max_position=0",
    "give max_position=0",
  ),
  "has seen tokens": (
    dict(max_position=3),
    "give max_position=0",
    "give max_position=0",
  ),
  "packed": (dict(ids=IDS), None, "packed rows"),
  "packed from a prefix": (
    dict(ids=IDS, reset=True),
    "reset_state may hold tokens",
    "packed rows",
  ),
  "sinks": (dict(spec=SINKS), None, "no mask for sink_tokens=5"),
  "blocks": (dict(spec=BLOCKS), None, "no mask for chunk_size=48"),
  "sinks of the window": (
    dict(spec=SINKS, sinks_of_window=True),
    "sink_query",
    "sink_query",
  ),
  "sinks, packed": (
    dict(spec=SINKS, ids=IDS),
    "sink_tokens in packed",
    "packed",
  ),
  "blocks, packed": (
    dict(spec=BLOCKS, ids=IDS),
    "chunk_size in packed",
    "packed",
  ),
  "float32": (dict(dtype="float32"), None, "not float32"),
  "float16": (dict(dtype="float16"), "not float16", "not float16"),
  "narrow": (dict(key_dim=48, value_dim=48), "key_dim=48 is not", None),
  "wide": (
    dict(key_dim=256, value_dim=256),
    None,
    "key_dim=256 is not",
  ),
  "widest": (dict(key_dim=320), "key_dim=320 is not", "must be equal"),
  "other values": (
    dict(value_dim=128),
    None,
    "value_dim=128 must be equal",
  ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_a_kernel_cannot_do(name, monkeypatch):
  options, *reasons = LIMITS[name]
  given = call(**options)
  device = python_types.SimpleNamespace(compute_capability="8.0")
  monkeypatch.setattr(library_gpu.jax, "devices", lambda: [device])
  for platform, reason in zip(("tpu", "gpu"), reasons, strict=True):
    kernel = f"library_{platform}"
    monkeypatch.setattr(dispatch, "current_platform", lambda: platform)  # noqa: B023
    said = softmax_attention.implementations.unsupported(kernel, given)
    chosen = softmax_attention.implementations.choose(None, given)
    if reason is None:
      assert said is None
      assert chosen == kernel
    else:
      assert reason in said
      assert chosen == "xla_chunked"


def test_the_reason_is_logged(monkeypatch, caplog):
  monkeypatch.setattr(dispatch, "current_platform", lambda: "tpu")
  # Each line is logged once: of a memory that no other test has run.
  implementations = copy.copy(softmax_attention.implementations)
  implementations.memory = "a memory"
  with caplog.at_level(logging.INFO, "memcomp"):
    for _ in range(2):
      implementations.choose(None, call(max_position=None))
  said = [record.message for record in caplog.records]
  assert said == [
    "a memory on tpu: not library_tpu, as the state may hold tokens: give"
    " max_position=0 where it is fresh",
    "a memory on tpu: xla_chunked",
  ]


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_named_on_the_wrong_machine(platform):
  spec = softmax_attention.Spec()
  state, inputs = arguments(spec, 8)
  with pytest.raises(NotImplementedError, match=r"devices in use are of cpu"):
    softmax_attention.chunk(
      state,
      inputs,
      spec=spec,
      implementation=f"library_{platform}",
      max_position=0,
    )


@pytest.mark.parametrize("capability", ["7.5", "gfx942", None])
def test_gpus_without_the_kernel(capability, monkeypatch):
  device = python_types.SimpleNamespace(compute_capability=capability)
  monkeypatch.setattr(library_gpu.jax, "devices", lambda: [device])
  monkeypatch.setattr(dispatch, "current_platform", lambda: "gpu")
  said = library_gpu.unsupported(call())
  assert f"capability {capability} is not" in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precision_of_products(dtype):
  """Forward and backward: float32 is not rounded on its way in."""
  state, inputs = arguments(softmax_attention.Spec(), 128, dtype=dtype)

  def objective(inputs):
    _, y = softmax_attention.chunk(
      state,
      inputs,
      spec=softmax_attention.Spec(),
      max_position=0,
      implementation="library_tpu",
    )
    return jnp.sum(y.astype(jnp.float32))

  with launch.compiled():
    text = str(jax.make_jaxpr(jax.grad(objective))(inputs))
  wanted = "HIGHEST" if dtype == "float32" else "DEFAULT"
  assert text.count("pallas_call[") == 3  # forward; keys and values; queries
  products = text.count("dot_general[")
  assert products >= 9
  assert text.count(f"precision=(Precision.{wanted}") == products
