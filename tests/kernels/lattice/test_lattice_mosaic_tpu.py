"""Lattice's TPU kernels, interpreted, against the XLA form."""

import dataclasses

import interpreter
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import lattice
from memcomp_kernels.lattice.pallas_tpu import plan
from memcomp_kernels.pallas_tpu import launch, pairs
from memcomp_kernels.testing import (
  errors,
  gradients,
  memories,
  tolerances,
)

LATTICE = memories.MEMORIES["lattice"]
TOKEN = lattice.Spec(num_slots=8, gradient_at="token")
CHUNK = lattice.Spec(num_slots=8, chunk_size=4)
SMALL = {"batch": 1, "heads": 2, "key_dim": 16, "value_dim": 16}
TILING = lattice.Tiling(tile_time=4, kernel_time=4)


def arguments(spec, time, *, dtype="float32", position=0, **sizes):
  """A state (inside a chunk if `position`), a fresh one, and inputs."""
  sizes = SMALL | sizes
  inputs = LATTICE.make_inputs(jax.random.key(0), spec, time=time, **sizes)
  inputs = gradients.cast_operands(inputs, dtype)
  state, fresh = (
    LATTICE.make_state(jax.random.key(seed), spec, **sizes) for seed in (1, 2)
  )
  if position:
    before = jax.tree.map(lambda x: x[:, :position], inputs)
    run = programs.compiled(lattice.chunk)
    state, _ = run(state, before, spec=spec, implementation="xla_chunked")
  return state, fresh, inputs


def both(
  spec,
  arguments,
  segment_ids=None,
  expected="xla_chunked",
  *,
  gradient=True,
  **mode,
):
  """Values, and gradients if asked for, of another form and of the kernels."""

  def run(implementation):
    def function(state, fresh, inputs):
      return lattice.chunk(
        state,
        inputs,
        spec=spec,
        segment_ids=segment_ids,
        reset_state=fresh,
        implementation=implementation,
        tiling=None if implementation == "reference" else TILING,
      )

    return gradients.value_and_gradients(function, arguments, gradient=gradient)

  with launch.interpreted(**mode):
    return run(expected), run("mosaic_tpu")


def assert_close(expected, actual):
  bounds = tolerances.VALUE["float32"], tolerances.GRADIENT["float32"]
  for a, b, bound, part in zip(
    actual, expected, bounds, ("values", "gradients"), strict=True
  ):
    errors.assert_close(a, b, bound, part)


MEANINGS = [
  (CHUNK, "encoding", "orthogonal"),
  (TOKEN, "decoding", "normalized"),
  (TOKEN, "similarity", "delta"),
  (TOKEN, "encoding", "orthogonal"),
  (CHUNK, "similarity", "delta"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("base", "objective", "update"),
  MEANINGS,
  ids=lambda x: getattr(x, "gradient_at", x),
)
def test_meanings(base, objective, update):
  """Seven tokens in tiles of four: the last tile is not full."""
  spec = dataclasses.replace(base, objective=objective, update=update)
  assert_close(*both(spec, arguments(spec, 7, value_dim=32)))


@rotation.both_parts
@pytest.mark.parametrize(
  "base",
  rotation.cases([TOKEN, CHUNK], [TOKEN]),
  ids=lambda x: x.gradient_at,
)
def test_packing(base, gradient):
  """Strictly: memory starts as nan, races are looked for."""
  ids = np.zeros((3, 11), np.int32)
  ids[0] = 1  # goes on, with chunks inside one
  ids[1, 1:4], ids[1, 4:6], ids[1, 8:] = 3, 4, 9
  ids[2, :2], ids[2, 3:9] = 1, 2
  spec = dataclasses.replace(base, forget_gate=base is TOKEN)
  position = 3 if spec.chunked else 0
  given = arguments(spec, 11, batch=3, position=position)
  how = {"gradient": gradient} | interpreter.STRICT_TPU
  assert_close(*both(spec, given, jnp.asarray(ids), **how))


@pytest.mark.slow
@pytest.mark.parametrize("base", [TOKEN, CHUNK], ids=lambda x: x.gradient_at)
def test_edges(base):
  """Tokens that forget all, at a chunk's end one that writes nothing as well.

  Held to the definition: the XLA form's logs of decays lose digits here.
  """
  state, fresh, inputs = arguments(base, 8)
  inputs = inputs._replace(
    log_decay=inputs.log_decay.at[:, 2:4].set(-1e4),
    write_rate=inputs.write_rate.at[:, 3].set(0.0),
    key=inputs.key.at[:, 5].set(0.0),
    value=inputs.value.at[:, 6].set(0.0),
  )
  assert_close(*both(base, (state, fresh, inputs), expected="reference"))


@pytest.mark.slow
@pytest.mark.parametrize("base", [TOKEN, CHUNK], ids=lambda x: x.gradient_at)
def test_bfloat16_is_no_worse_than_the_xla_form(base):
  given = arguments(base, 8, dtype="bfloat16")
  truth, _ = both(base, gradients.cast(given, jnp.float32))
  xla, kernel = both(base, given)
  errors.assert_no_worse(kernel, xla, truth)


@pytest.mark.slow
def test_under_shard_map():
  """Rows and heads over a mesh: each device runs a kernel of its own."""
  state, fresh, inputs = arguments(TOKEN, 4, batch=2)
  with launch.interpreted():
    alone, over = meshes.alone_and_over_a_mesh(
      lattice.chunk,
      (state, fresh, inputs),
      spec=TOKEN,
      implementation="mosaic_tpu",
      tiling=TILING,
    )
  errors.assert_close(over, alone, tolerances.SHARDED, "sharded")


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("batch", [1, 50])
def test_pairs_on_lanes_and_back(parts, batch):
  lanes = pairs.Lanes(3 * batch, parts)
  x = jax.random.normal(jax.random.key(0), (batch, 3, 2, 32))
  split, shared = lanes.split(x), lanes.share(x)
  assert split.shape == (lanes.blocks, 2, 32 // parts, 128)
  np.testing.assert_array_equal(lanes.join(split, batch), x)
  last = divmod(3 * batch - 1, lanes.width)
  for part in range(parts):
    lane = part * lanes.width + last[1]
    np.testing.assert_array_equal(shared[last[0], ..., lane], x[-1, -1])


def test_lanes_are_filled():
  """Few pairs are spread over parts; lanes hold at most 64 dimensions."""
  for num_pairs, dim, parts in [
    (128, 64, 1),
    (128, 128, 2),
    (24, 64, 4),
    (24, 128, 4),
    (1, 64, 8),
  ]:
    assert plan.layouts(num_pairs, dim)[0].parts == parts


def test_a_named_kernel_that_cannot_run_says_why():
  state, _, inputs = arguments(TOKEN, 4)

  def chunk(spec=TOKEN, inputs=inputs, tiling=None):
    return lattice.chunk(
      state, inputs, spec=spec, implementation="mosaic_tpu", tiling=tiling
    )

  with pytest.raises(NotImplementedError, match="devices in use are of cpu"):
    chunk()
  with launch.interpreted():
    sparse = dataclasses.replace(TOKEN, sparsity=0.1)
    with pytest.raises(
      NotImplementedError, match=r"no kernel for sparsity=0\.1"
    ):
      chunk(sparse)
    half = inputs._replace(value=inputs.value.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="must all be bfloat16 or"):
      chunk(inputs=half)
    with pytest.raises(NotImplementedError, match=r"needs [\d,]+ bytes of VM"):
      chunk(tiling=lattice.Tiling(kernel_time=4096))
