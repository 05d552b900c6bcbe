"""Trellis's TPU kernels, interpreted, against the XLA form."""

import dataclasses

import interpreter
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import dispatch, trellis
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import (
  checks,
  errors,
  gradients,
  memories,
  tolerances,
)
from memcomp_kernels.trellis import tilings
from memcomp_kernels.trellis.pallas_tpu import engine

TRELLIS = memories.MEMORIES["trellis"]
SPEC = trellis.Spec(num_slots=16, chunk_size=16)
SMALL = {"batch": 1, "heads": 8, "key_dim": 16, "value_dim": 16}


def tiling(decay="auto", **changes):
  changes = {"units": 2, "chunks": 2, "group": 1, "skew": 1} | changes
  sizes = tilings.KernelTiling(**changes)
  return trellis.Tiling(forward=sizes, backward=sizes, decay=decay)


def arguments(spec, time, *, dtype="float32", passes=1, position=0, **sizes):
  """A state (inside a chunk if `position`), a fresh one, and inputs."""
  sizes = SMALL | sizes
  inputs = TRELLIS.make_inputs(
    jax.random.key(0), spec, time=time, passes=passes, **sizes
  )
  wide = ("log_decay", "write_rate", "log_phi_eps")
  inputs = inputs._replace(
    **{
      name: x.astype(dtype)
      for name, x in inputs._asdict().items()
      if name not in wide
    }
  )
  state, fresh = (
    TRELLIS.make_state(jax.random.key(seed), spec, **sizes) for seed in (1, 2)
  )
  if position:
    before = jax.tree.map(lambda x: x[:, :position], inputs)
    run = programs.compiled(trellis.chunk)
    state, _ = run(state, before, spec=spec, implementation="xla_chunked")
  return state, fresh, inputs


def run(
  implementation, spec, arguments, segment_ids=None, tiling=None, gradient=True
):
  """Values, and gradients if asked for."""

  def function(state, fresh, inputs):
    return trellis.chunk(
      state,
      inputs,
      spec=spec,
      segment_ids=segment_ids,
      reset_state=fresh,
      implementation=implementation,
      tiling=tiling,
    )

  return gradients.value_and_gradients(function, arguments, gradient=gradient)


def both(*given, gradient=True, **mode):
  """Of the XLA form and of the kernels."""
  with launch.interpreted(**mode):
    return tuple(
      run(name, *given, gradient=gradient)
      for name in ("xla_chunked", "mosaic_tpu")
    )


def assert_close(expected, actual):
  bounds = tolerances.VALUE["float32"], tolerances.GRADIENT["float32"]
  for a, b, bound, part in zip(
    actual, expected, bounds, ("values", "gradients"), strict=True
  ):
    errors.assert_close(a, b, bound, part)


CASES = {
  "ln_silu": {"read_activation": "softmax"},
  "l2_silu": {"read_activation": "l2"},
  "silu": {"read_activation": "identity"},
  "l2": {"read_activation": "silu"},
  "softmax": {"read_activation": "l2_silu"},
  "identity": {"read_activation": "ln_silu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("phi", CASES)
def test_activations(phi):
  spec = dataclasses.replace(SPEC, phi=phi, **CASES[phi])
  assert_close(*both(spec, arguments(spec, 32), None, tiling()))


DECAYS = ["separable", "safe"]


@pytest.mark.slow
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dims", [(32, 64), (128, 64)])
def test_sizes(decay, dims):
  sizes = {"heads": 4, "key_dim": dims[0], "value_dim": dims[1]}
  spec = trellis.Spec(num_slots=32, chunk_size=32)
  given = arguments(spec, 64, **sizes)
  assert_close(*both(spec, given, None, tiling(decay=decay)))


OPTIONS = {
  "two gates": ({}, {"passes": 2}),
  "two gates, safe": ({}, {"passes": 2, "decay": "safe"}),
  "learned eps": ({"phi_eps": 7.0}, {}),
  "no forgetting": ({"forget_gate": False}, {}),
  "first order": ({"first_order": True}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option):
  changes, how = OPTIONS[option]
  how = dict(how)
  decay = how.pop("decay", "auto")
  spec = dataclasses.replace(SPEC, **changes)
  given = arguments(spec, 48, **how)
  assert_close(*both(spec, given, None, tiling(decay=decay)))


@pytest.mark.slow  # so it is in packed rows
@pytest.mark.parametrize("decay", DECAYS)
def test_memory_is_not_read_before_it_is_written(decay):
  given = arguments(SPEC, 64)
  both_forms = both(
    SPEC, given, None, tiling(decay=decay), **interpreter.STRICT_TPU
  )
  assert_close(*both_forms)


@pytest.mark.slow
@pytest.mark.parametrize("time", [1, 16, 70])
def test_lengths(time):
  given = arguments(SPEC, time)
  assert_close(*both(SPEC, given, None, tiling(chunks=4)))


@pytest.mark.slow
@pytest.mark.parametrize("position", [1, 15])
def test_a_chunk_that_began_before(position):
  given = arguments(SPEC, 40, position=position)
  assert_close(*both(SPEC, given, None, tiling()))


@rotation.both_parts
@pytest.mark.parametrize("decay", rotation.cases(DECAYS, ["safe"]))
def test_packing(decay, gradient):
  position = 5 if decay == "safe" else 0
  ids = np.zeros((3, 70), np.int32)
  ids[0] = 1
  ids[1, 5:23], ids[1, 23:26], ids[1, 30:] = 3, 4, 9
  ids[2, 2:12], ids[2, 14:20] = 1, 1
  given = arguments(SPEC, 70, position=position, batch=3)
  # What decays to nothing must not come back as a quotient of nothings.
  _, _, inputs = given
  forgets = inputs.log_decay.at[:, 3:60:9].set(-1e4)
  if decay == "safe":
    given = (*given[:2], inputs._replace(log_decay=forgets))
  how = {"gradient": gradient} | interpreter.STRICT_TPU
  assert_close(*both(SPEC, given, jnp.asarray(ids), tiling(decay=decay), **how))


@pytest.mark.slow
@pytest.mark.parametrize("gradient_at", ["chunk_start", "token"])
def test_strong_decays(gradient_at):
  """Their sums fit one float32: what is left of a memory is bounded below."""
  spec = dataclasses.replace(SPEC, gradient_at=gradient_at)
  state, fresh, inputs = arguments(spec, 40, position=5)
  log_decay = checks.strong_decays(inputs.log_decay)
  given = state, fresh, inputs._replace(log_decay=log_decay)
  found = both(spec, given)
  if spec.chunked:
    # Next to nothing is read of these; how little, the kernels do not tell.
    unread = ("key_memory", "value_memory")
    for _, (d_state, *_) in found:
      assert all(np.abs(getattr(d_state, name)).max() < 1e-9 for name in unread)
    found = ((values, adjoints[1:]) for values, adjoints in found)
  assert_close(*found)


@pytest.mark.slow
@rotation.both_parts
def test_segments_that_start_inside_a_chunk(gradient):
  """The XLA form does such a call, which only its arrays tell."""
  given = arguments(SPEC, 40, position=5)
  given = given[0], given[0], given[2]
  ids = jnp.asarray([[1] * 7 + [2] * 15 + [3] * 18])
  assert_close(*both(SPEC, given, ids, tiling(), gradient=gradient))


@pytest.mark.slow
def test_the_range_of_decays_chooses_the_form():
  given = arguments(SPEC, 64)
  state, fresh, inputs = given
  some = (jnp.arange(64) % 4 == 0)[:, None, None]
  shifted = inputs._replace(log_decay=inputs.log_decay - 24.0 * some)
  given = state, fresh, shifted  # exp(4 * 24) is infinite

  def values(implementation, tiling=None):
    def function(state, fresh, inputs):
      return trellis.chunk(
        state,
        inputs,
        spec=SPEC,
        reset_state=fresh,
        implementation=implementation,
        tiling=tiling,
      )

    with launch.interpreted():
      return jax.jit(function)(*given)

  expected, bound = values("xla_chunked"), tolerances.VALUE["float32"]
  actual = values("mosaic_tpu", tiling())
  errors.assert_close(actual, expected, bound, "values")
  with pytest.raises(AssertionError, match=r"over 1e-05|finite"):
    actual = values("mosaic_tpu", tiling(decay="separable"))
    errors.assert_close(actual, expected, bound, "values")


def assert_no_worse(truth, xla, kernel):
  """Than twice the XLA form's error, in values and in gradients."""
  for parts in zip(truth, xla, kernel, strict=True):
    for true, a, b in zip(*map(jax.tree.leaves, parts), strict=True):
      own, ours = errors.relative_rms(a, true), errors.relative_rms(b, true)
      assert ours <= max(2.0 * own, 1e-6), (own, ours)


@pytest.mark.slow
@rotation.both_parts
def test_bfloat16_is_no_worse_than_the_xla_form(gradient):
  given = arguments(SPEC, 64, dtype="bfloat16")
  wide = gradients.cast(given, jnp.float32)
  truth = run("xla_chunked", SPEC, wide, gradient=gradient)
  xla, kernel = both(SPEC, given, None, tiling(), gradient=gradient)
  assert_no_worse(truth, xla, kernel)


@pytest.mark.slow
def test_under_shard_map():
  """Rows and heads over a mesh: each device runs a kernel of its own."""
  state, fresh, inputs = arguments(SPEC, 32, batch=2, heads=16)
  with launch.interpreted():
    alone, over = meshes.alone_and_over_a_mesh(
      trellis.chunk,
      (state, fresh, inputs),
      spec=SPEC,
      implementation="mosaic_tpu",
      tiling=tiling(),
      differentiate=False,
    )
  errors.assert_close(over, alone, tolerances.SHARDED, "sharded")


def test_a_named_kernel_that_cannot_run_says_why():
  state, _, inputs = arguments(SPEC, 16)

  def chunk(spec=SPEC, inputs=inputs, state=state):
    return trellis.chunk(state, inputs, spec=spec, implementation="mosaic_tpu")

  with pytest.raises(NotImplementedError, match="devices in use are of cpu"):
    chunk()
  with launch.interpreted():
    odd = dataclasses.replace(SPEC, chunk_size=24)
    with pytest.raises(NotImplementedError, match="chunk_size=24 must be"):
      chunk(odd)
    three = arguments(SPEC, 16, heads=3)
    with pytest.raises(
      NotImplementedError, match="heads=3 must be a multiple of 8"
    ):
      chunk(inputs=three[2], state=three[0])
    half = inputs._replace(value=inputs.value.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="must all be bfloat16 or"):
      chunk(inputs=half)


def test_default_steps_shrink_until_they_fit(monkeypatch):
  """Where not even the smallest step fits, the XLA form runs the call."""
  monkeypatch.setattr(dispatch, "current_platform", lambda: "tpu")
  sizes = {"batch": 4, "heads": 8, "dtype": "bfloat16"}

  def chosen(slots, dim, **options):
    spec = trellis.Spec(num_slots=slots, chunk_size=128, **options)

    def make():
      state, _, inputs = arguments(
        spec, 256, key_dim=dim, value_dim=dim, **sizes
      )
      return state, inputs

    call = dispatch.Call(*jax.eval_shape(make), spec)
    with launch.compiled("v5e"):
      return trellis.implementations.choose(None, call)

  assert chosen(512, 256) == "mosaic_tpu"
  assert chosen(2048, 512) == "xla_chunked"
  assert chosen(512, 512, gradient_at="token") == "xla_chunked"


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True], ids=["values", "gradients"])
def test_a_smaller_step_is_the_same_function(monkeypatch, gradient):
  sizes = []

  def needed(plan, *_):
    sizes.append((plan.units, plan.chunks))
    # Only steps of one chunk of 16 tokens fit, of which 8 fill the lanes.
    return launch.LIMIT + (plan.chunks > 8 or plan.units > 1)

  monkeypatch.setattr(engine.call_lib, "needed", needed)
  given = arguments(SPEC, 140, heads=16)
  found = both(SPEC, given, gradient=gradient)
  assert sizes[0] == (2, 8) and sizes[-1] == (1, 8)
  assert_close(*found)


def test_blocks_that_cannot_fit_say_how_much_they_need():
  spec = trellis.Spec(num_slots=256, chunk_size=128)
  state, _, inputs = arguments(
    spec, 512, heads=12, key_dim=128, value_dim=128, dtype="bfloat16"
  )
  with (
    launch.interpreted(),
    pytest.raises(NotImplementedError, match=r"needs [\d,]+ bytes of VMEM"),
  ):
    big = tiling(units=12, chunks=64)
    jax.eval_shape(
      lambda: programs.direct(engine.chunk)(
        state, inputs, spec=spec, tiling=big
      )
    )
