"""Trellis's GPU kernel: interpreted, against the XLA form; lowered.

On a GPU, the same for real: see `test_affine_mosaic_gpu`.
"""

import dataclasses
import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import dispatch, trellis
from memcomp_kernels.math import activations
from memcomp_kernels.pallas_gpu import rows, smem, tile_kernel
from memcomp_kernels.testing import checks, errors, gradients, memories
from memcomp_kernels.trellis.pallas_gpu import engine

XLA = functools.partial(trellis.chunk, implementation="xla_chunked")
SPEC = trellis.Spec(num_slots=64, chunk_size=32)
TOKEN = dataclasses.replace(SPEC, gradient_at="token")
MEMORY = memories.MEMORIES["trellis"]
COMPILED = programs.of(trellis)


@gradients.on_cpu
def arguments(spec, time, batch=1, before=5, key_dim=64, value_dim=64):
  """A state inside a chunk, one that segments start from, and inputs."""
  sizes = {
    "batch": batch,
    "heads": 2,
    "key_dim": key_dim,
    "value_dim": value_dim,
  }
  inputs = MEMORY.make_inputs(
    jax.random.key(0), spec, time=time + before, **sizes
  )
  inputs = gradients.cast(inputs, jnp.float32)
  states = [
    gradients.cast(
      MEMORY.make_state(jax.random.key(i), spec, **sizes), "float32"
    )
    for i in (1, 2)
  ]
  begun = jax.tree.map(lambda x: x[:, :before], inputs)
  state, _ = COMPILED.reference(states[0], begun, spec=spec)
  inputs = jax.tree.map(lambda x: x[:, before:], inputs)
  return state, states[1], gradients.cast_operands(inputs, "bfloat16")


def check(
  spec, given, ids=None, *, gradient=True, of_start=True, times=2.0, **mode
):
  """The kernel errs by at most `times` what the XLA form errs by itself."""

  def run(chunk):
    def function(state, fresh, inputs):
      return chunk(state, inputs, spec=spec, segment_ids=ids, reset_state=fresh)

    return function

  of = functools.partial(gradients.value_and_gradients, gradient=gradient)
  on_cpu = gradients.on_cpu(of)
  truth = on_cpu(run(trellis.reference), gradients.cast(given, jnp.float32))
  expected = on_cpu(run(XLA), given)
  with tile_kernel.tried(**mode):
    actual = of(run(programs.direct(engine.chunk)), given)
  found = actual, expected, truth
  if not of_start:
    found = ((values, adjoints[1:]) for values, adjoints in found)
  errors.assert_no_worse(*found, times=times)


@rotation.both_parts
def test_packing(gradient):
  """Strictly: memory starts as nan, races are looked for."""
  ids = np.zeros((2, 70), np.int32)
  ids[0] = 1  # goes on, inside a chunk
  ids[1, 3:40], ids[1, 45:] = 5, 2
  given = arguments(SPEC, 70, batch=2)
  check(
    SPEC, given, jnp.array(ids), gradient=gradient, **interpreter.STRICT_GPU
  )


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, TOKEN], ids=["chunk", "token"])
def test_strong_decays(spec):
  """Their sums fit one float32: what is left of a memory is bounded below."""
  state, fresh, inputs = arguments(spec, 40)
  log_decay = checks.strong_decays(inputs.log_decay)
  given = state, fresh, inputs._replace(log_decay=log_decay)
  # Next to nothing is read of these; how little, the kernels do not tell.
  check(spec, given, of_start=not spec.chunked)


@pytest.mark.slow
def test_segments_that_start_inside_a_chunk():
  """The XLA form does such a call, which only its arrays tell."""
  state, _, inputs = arguments(SPEC, 40)
  ids = jnp.array([[1] * 7 + [2] * 15 + [3] * 18])
  check(SPEC, (state, state, inputs), ids)


@pytest.mark.slow
def test_a_row_of_padding():
  """Inside a chunk, whose start is handed on, and so is its adjoint."""
  ids = jnp.array([[0] * 6, [0] * 2 + [1] * 4])
  check(SPEC, arguments(SPEC, 6, batch=2), ids)


@pytest.mark.slow
@pytest.mark.parametrize(("time", "gates"), [(27, 2), (59, 1), (64, 2)])
def test_equals_the_xla_form(time, gates):
  state, fresh, inputs = arguments(SPEC, time)
  shared = {
    name: getattr(inputs, name)[..., :gates]
    for name in ("log_decay", "write_rate")
  }
  check(SPEC, (state, fresh, inputs._replace(**shared)))


@pytest.mark.slow
@pytest.mark.parametrize("time", [40, 64])
def test_chunks_from_the_first_token_on(time):
  """No chunk under way; at 64 none left open: the kernels without flags."""
  check(SPEC, arguments(SPEC, time, before=32))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("size", "time", "rate"),
  [(16, 80, 1.0), (1, 64, 1.0), (8, 128, 0.3), (16, 16, 0.3), (32, 64, 3.0)],
)
def test_several_chunks_a_tile(size, time, rate):
  """From the first token on; strong writes, of which later chunks' hang."""
  spec = dataclasses.replace(SPEC, chunk_size=size)
  state, fresh, inputs = arguments(spec, time, before=32)
  strong = jnp.full_like(inputs.write_rate, rate)
  given = state, fresh, inputs._replace(write_rate=strong)
  check(spec, given, **(interpreter.STRICT_GPU if size == 16 else {}))


@rotation.both_parts
def test_gradients_per_token(gradient):
  """Strictly, and packed: segments of less and of more than a tile."""
  ids = jnp.array([[1] * 2 + [0] + [2] * 67])
  check(
    TOKEN,
    arguments(TOKEN, 70),
    ids,
    gradient=gradient,
    **interpreter.STRICT_GPU,
  )


@pytest.mark.slow
@pytest.mark.parametrize("time", [1, 64, 130])
def test_gradients_per_token_of_one_segment(time):
  check(TOKEN, arguments(TOKEN, time))


@pytest.mark.slow
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (64, 128), (128, 64)], ids=str)
def test_wide_heads(token, dims):
  """Where results take the place of operands in shared memory."""
  spec = TOKEN if token else SPEC
  key_dim, value_dim = dims
  given = arguments(spec, 70, key_dim=key_dim, value_dim=value_dim)
  check(spec, given, **interpreter.STRICT_GPU)


@pytest.mark.slow
def test_strong_writes_per_token():
  """Each token overwrites: what the sweeps find hangs on all before it."""
  state, fresh, inputs = arguments(TOKEN, 70)
  strong = inputs._replace(write_rate=jnp.full_like(inputs.write_rate, 4.0))
  # The kernel's gradient of a decay is a difference of sums, whose bfloat16 terms
  # are large here: 1.3 to 2.1 times the XLA form's error in eight draws.
  check(TOKEN, (state, fresh, strong), times=2.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* encountered in matmul")
@pytest.mark.parametrize(("strength", "finite"), [(3.3, True), (8.0, False)])
def test_sweeps_that_overflow(strength, finite):
  """On the way alone, where a growth of 1 + strength does: 4.3^63, 2.3^63."""
  spec = dataclasses.replace(TOKEN, phi="identity")
  state, fresh, inputs = arguments(spec, 64)
  inputs = inputs._replace(
    key=jnp.full_like(inputs.key, 1 / 8),  # of norm 1
    log_decay=jnp.zeros_like(inputs.log_decay),
    write_rate=jnp.full_like(inputs.write_rate, 0.01).at[..., 0].set(strength),
  )

  def memory(chunk):
    after, _ = chunk(state, inputs, spec=spec, reset_state=fresh)
    return after.key_memory

  with tile_kernel.tried():
    actual = memory(programs.direct(engine.chunk))
  if finite:
    errors.assert_close(
      actual, gradients.on_cpu(memory)(XLA), 0.1, "key memory"
    )
  else:
    assert jnp.all(jnp.isnan(actual))


@pytest.mark.slow
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize(
  "change",
  [
    {"chunk_size": 64},
    {"chunk_size": 16, "forget_gate": False},
    {"phi": "softmax", "read_activation": "softmax"},
    {"phi": "l2_silu", "read_activation": "l2"},
    {"phi": "identity", "read_activation": "silu"},
    {"first_order": True},
    {"num_slots": 128},
  ],
  ids=str,
)
def test_other_meanings(change, token):
  spec = dataclasses.replace(TOKEN if token else SPEC, **change)
  check(spec, arguments(spec, 70))


@pytest.mark.slow
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_activations_of_rows(name):
  """Formulas against the definition and its gradients, in float64."""
  with jax.enable_x64(True):
    z, target, d = jax.random.normal(jax.random.key(0), (3, 5, 8), jnp.float64)
    known, pull = jax.vjp(lambda z: activations.activate(name, z, 0.3), z)
    ours = (
      rows.activate(name, z, 0.3),
      rows.activate_adjoint(name, z, 0.3, d),
    )
    check_formulas(ours, (known, *pull(d)), name)
    known, pull = jax.vjp(
      lambda *given: activations.write_direction(name, *given, 0.3), z, target
    )
    ours = (
      rows.write_direction(name, z, target, 0.3),
      *rows.write_direction_adjoint(name, z, target, 0.3, d),
    )
    check_formulas(ours, (known, *pull(d)), name)


def check_formulas(ours, known, name):
  for i, (a, b) in enumerate(zip(ours, known, strict=True)):
    errors.assert_close(a, b, 1e-12, f"{name} {i}")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("dim", "slots"),
  rotation.cases([(64, 64), (128, 64), (64, 128)], [(64, 64)]),
)
@pytest.mark.parametrize(
  ("spec", "kernels"), rotation.cases([(SPEC, 8), (TOKEN, 4)], [(SPEC, 8)])
)
def test_lowers(spec, kernels, dim, slots):
  """Both ways, for calls that start a chunk and, where it matters, do not."""
  spec = dataclasses.replace(spec, num_slots=slots)
  given = arguments(spec, 70, key_dim=dim, value_dim=dim)
  assert lowered(spec, *given).count("mosaic_gpu_v2") == kernels


@pytest.mark.slow
def test_lowers_with_targets_that_are_wider_than_keys():
  """Where an adjoint takes its operand's place in shared memory."""
  spec = dataclasses.replace(SPEC, num_slots=128)
  *states, inputs = arguments(spec, 70, key_dim=64, value_dim=64)
  inputs = inputs._replace(target=inputs.target.astype(jnp.float32))
  assert lowered(spec, *states, inputs).count("mosaic_gpu_v2") == 8


def lowered(spec, state, fresh, inputs):
  """The program of a gradient, lowered for a GPU."""

  def loss(inputs):
    _, output = programs.direct(engine.chunk)(
      state, inputs, spec=spec, reset_state=fresh
    )
    return jnp.sum(jnp.square(output.astype(jnp.float32)))

  with tile_kernel.lowered():
    traced = jax.jit(jax.grad(loss)).trace(inputs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_one_step_takes_as_little_as_it_can():
  part = jax.ShapeDtypeStruct((64, 64), "bfloat16")

  def slots(steps):
    return smem.slots(
      [part], {"x": part}, [], "name", ["x"], steps=steps, blocks=1
    )

  assert slots(2) == (2, {"x": 2})
  assert slots(1) == (1, {"x": 0})


def test_says_why_not(monkeypatch):
  monkeypatch.setattr(dispatch, "current_platform", lambda: "cpu")

  def chunk(spec, inputs, state, tiling=None):
    name = "mosaic_gpu"
    trellis.chunk(state, inputs, spec=spec, implementation=name, tiling=tiling)

  state, _, inputs = arguments(SPEC, 8)
  with pytest.raises(NotImplementedError, match="devices in use are of cpu"):
    chunk(SPEC, inputs, state)
  with tile_kernel.lowered():
    wide = inputs._replace(query=inputs.query.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="must all be bfloat16"):
      chunk(SPEC, wide, state)
    with pytest.raises(NotImplementedError, match="leave tiling out"):
      chunk(SPEC, inputs, state, trellis.Tiling(tile_time=32))
    for change, said in (
      ({"value_readout_phi": True}, "value_readout_phi"),
      ({"chunk_size": 128}, "chunk_size=128 is more than 64"),
      ({"num_slots": 32}, "num_slots=32 is none of"),
    ):
      spec = dataclasses.replace(SPEC, **change)
      assert said in engine.unsupported(dispatch.Call(None, inputs, spec))
    spec = dataclasses.replace(SPEC, num_slots=128)
    _, _, inputs = arguments(spec, 8, value_dim=128)
    said = "num_slots=128 times value_dim=128 is more than 8192"
    assert said in engine.unsupported(dispatch.Call(None, inputs, spec))
