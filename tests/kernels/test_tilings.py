"""Level 2: the sizes of free tiles change no result, whatever they are."""

import dataclasses
import functools

import jax
import pytest
import rotation

from memcomp_kernels import lattice, trellis
from memcomp_kernels.chunking import form
from memcomp_kernels.math import channel_decay, solver
from memcomp_kernels.testing import errors, memories, subjects, tolerances

TIME = 23  # leaves every tile a rest
TILES = {
  ("delta_rule", "gated"): (1, 3, 16),
  ("infini_attention", "token"): (1, 3, 16),
  ("linear_attention", "decayed"): (1, 3, 16),
  ("rwkv7", "released"): ((3, 1), (10, 5), (16, 16)),
  ("slot_attention", "gated"): ((3, 1), (10, 5), (16, 16)),
  ("state_space_duality", "shared"): (1, 3, 16),
  ("test_time_training", "linear-token"): (5,),
  ("test_time_training", "mlp-token"): (7,),
  ("two_pass_delta", "write-first"): (1, 5, 16),
}
"""Tokens of a tile; pairs are (tile_time, block_time)."""

ALWAYS = (
  ("linear_attention", "decayed", 16),
  ("slot_attention", "gated", (10, 5)),
  ("state_space_duality", "shared", 16),
)


@pytest.mark.parametrize(
  ("name", "spec", "sizes"),
  rotation.cases(
    [(*case, sizes) for case, of in TILES.items() for sizes in of], ALWAYS
  ),
)
@pytest.mark.usefixtures("float64")
def test_any_tile_is_the_recurrence(name, spec, sizes):
  memory = memories.MEMORIES[name]
  case = subjects.Subject(memory, memory.specs[spec], "xla_chunked")
  if isinstance(sizes, int):
    tiling = form.Tiling(tile_time=sizes)
  else:
    tiling = channel_decay.Tiling(tile_time=sizes[0], block_time=sizes[1])
  chunk = functools.partial(
    memory.op.chunk,
    spec=case.spec,
    tiling=tiling,
    implementation="xla_chunked",
  )
  arguments = case.state(heads=4), case.inputs(TIME, heads=4)
  default = functools.partial(chunk, tiling=None)
  assert str(jax.make_jaxpr(chunk)(*arguments)) != str(
    jax.make_jaxpr(default)(*arguments)
  )
  errors.assert_close(
    jax.jit(chunk)(*arguments)[:2],
    jax.jit(case.reference)(*arguments),
    tolerances.VALUE["float64"],
    "values",
  )


def test_every_tiling_is_tried():
  """Trellis and Lattice have tests of their own, of every solver."""
  tried = {name for name, _ in TILES} | {"trellis", "lattice"}
  assert tried == {
    name for name, memory in memories.MEMORIES.items() if memory.op.Tiling
  }


@pytest.mark.parametrize(
  "Tiling",
  [
    channel_decay.Tiling,
    form.Tiling,
    lattice.Tiling,
    solver.Solver,
    trellis.Tiling,
  ],
  ids=lambda Tiling: Tiling.__module__,
)
def test_a_tiling_is_checked_when_it_is_made(Tiling):
  for field in dataclasses.fields(Tiling):
    if field.type in (int, int | None):
      with pytest.raises(
        TypeError, match=rf"^{field.name}=4.0 is of type float"
      ):
        Tiling(**{field.name: 4.0})
      with pytest.raises(
        ValueError, match=rf"^{field.name}=0 must be at least 1"
      ):
        Tiling(**{field.name: 0})
    elif field.type is str:
      with pytest.raises(
        ValueError, match=rf"^{field.name}='\?' is not one of: "
      ):
        Tiling(**{field.name: "?"})
