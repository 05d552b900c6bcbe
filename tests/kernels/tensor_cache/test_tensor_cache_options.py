"""Level 1: Tensor Cache's slots, timescales and norms, its sizes and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensor_cache_by_hand import (
  COMPILED,
  MEMORY,
  TIME,
  by_hand,
  drawn,
  every,
  evicted,
  fresh,
  reads,
)

from memcomp_kernels import tensor_cache
from memcomp_kernels.tensor_cache import tile
from memcomp_kernels.testing import checks, subjects

pytestmark = pytest.mark.usefixtures("float64")


def routed(spec, write, read, time=TIME):
  """Inputs all of whose tokens take the same routes."""
  one = drawn(spec, time)

  def everywhere(route):
    return jnp.broadcast_to(jnp.array(route, jnp.float64), (1, time, 1, 3))

  return one._replace(
    write_route=everywhere(write), read_route=everywhere(read)
  )


@pytest.mark.parametrize("make", [evicted, every])
def test_one_slot_of_three_is_the_single_slot_memory(make):
  single, slots = make(rule="delta"), make(rule="delta", num_slots=3)
  inputs = routed(slots, [0, 1, 0], [0, 1, 0])
  expected = reads(single, inputs._replace(write_route=None, read_route=None))
  np.testing.assert_allclose(reads(slots, inputs)[0], expected[0], atol=1e-13)
  # Half a route reads half; slots that are not written are not decayed.
  state = fresh(slots, 4, 4)
  full = state.memories._replace(memory=state.memories.memory + 1.0)
  state = state._replace(memories=full, starts=state.starts and full)
  inputs = inputs._replace(read_route=inputs.read_route / 2)
  final, _ = COMPILED.reference(state, inputs, spec=slots)
  kept = np.array(final.memories.memory[0, 0, 0])
  np.testing.assert_array_equal(kept[[0, 2]], np.ones((2, 4, 4)))
  assert np.abs(kept[1] - 1).max() > 0.01
  half = reads(slots, inputs)[0]
  np.testing.assert_allclose(half, expected[0] / 2, atol=1e-13)


@pytest.mark.parametrize(("route_by", "slot"), [("key", 0), ("query", 1)])
def test_whose_route_an_evicted_token_takes(route_by, slot):
  spec = evicted(window_size=1, num_slots=2, route_by=route_by)
  inputs = by_hand([1, 1], [7, 9])
  # Token 0 asks for slot 0, token 1, which evicts it, for slot 1.
  routes = jnp.eye(2, dtype=jnp.float64)[None, :, None]
  inputs = inputs._replace(write_route=routes, read_route=routes)
  final, _ = COMPILED.reference(fresh(spec), inputs, spec=spec)
  written = np.array(final.memories.memory[0, 0, 0, :, 0, 0])
  np.testing.assert_allclose(written, [7, 0] if slot == 0 else [0, 7])


@pytest.mark.parametrize("make", [evicted, every])
def test_two_timescales_are_two_memories(make):
  """(13): r = q A_fast + alpha q A_slow."""
  inputs = drawn(make(timescales=2))
  expected = 0
  for i, weight in ((0, 1.0), (1, np.array(inputs.read_mix[0, :, 0]))):
    one = inputs._replace(
      log_decay=inputs.log_decay[..., i : i + 1],
      write_rate=inputs.write_rate[..., i : i + 1],
      read_mix=None,
    )
    expected = expected + weight * reads(make(), one)[0]
  both = reads(make(timescales=2), inputs)[0]
  np.testing.assert_allclose(both, expected, atol=1e-13)


def test_read_normalisation_by_hand():
  """z = lambda z + eta k; r / max(|q z|, 1)."""
  spec = evicted(window_size=1, read_norm=True)
  r, _ = reads(spec, by_hand([1, -4, 0], [6, 5, 0], query=2.0))
  # Token 0 written: A = 6, z = 1, q z = 2. Token 1: A = -17, z = -3.5.
  np.testing.assert_allclose(r[:, 0], [0, 0, 2 * 6 / 2])
  r, _ = reads(spec, by_hand([1, -4, 0, 0], [6, 5, 0, 0], query=2.0))
  np.testing.assert_allclose(r[3, 0], 2 * -17 / 7)


@pytest.mark.parametrize("make", [evicted, every])
def test_what_is_normalised_on_the_way_into_the_memory(make):
  plain = make()
  inputs = drawn(plain)

  def unit(x):
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-5)

  spec = make(unit_keys=True, unit_queries=True, value_scale=0.5)
  changed = inputs._replace(
    query=unit(inputs.query), key=unit(inputs.key), value=inputs.value / 2
  )
  np.testing.assert_allclose(
    reads(spec, inputs)[0], reads(plain, changed)[0], rtol=1e-12, atol=1e-13
  )
  state = fresh(spec, 4, 4)
  local = COMPILED.reference(state, inputs, spec=spec)[1][..., :4]
  expected = COMPILED.reference(state, inputs, spec=plain)[1][..., :4]
  np.testing.assert_array_equal(local, expected)


def test_bytes_of_the_state():
  """The paper's 112 kB: W = 12, 4 layers, 4 heads of 32, float32."""
  spec = tensor_cache.Spec(window_size=12, write_population="evicted")
  state = tensor_cache.init_state(
    spec, batch=1, heads=4, key_dim=32, value_dim=32
  )
  window, memory = (
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    for tree in (state.window, state.memories)
  )
  assert (4 * window, 4 * memory) == (48 * 1024, 64 * 1024)
  whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  assert 4 * whole == 112 * 1024 + 4 * 8  # position and segment


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  ["evicted-outer", "all-mean", "all-slots-delta-timescales"],
)
def test_tiles_are_speed(monkeypatch, name):
  monkeypatch.setattr(tile, "tile_time", lambda spec, time: 5)
  checks.check_values(
    subjects.Subject(MEMORY, MEMORY.specs[name], "xla_chunked"), 23
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rule": "hebb"}, "rule='hebb' is not one of"),
    ({"write_population": "none"}, "write_population"),
    ({"route_by": "value"}, "route_by"),
    ({"window_size": 0}, "window_size=0 must be at least 1"),
    ({"chunk_size": 0}, "chunk_size=0 must be at least 1"),
    ({"num_slots": 0}, "num_slots=0 must be at least 1"),
    ({"sink_tokens": 8, "window_size": 8}, "sink_tokens=8 must be in"),
    ({"sink_tokens": -1}, "sink_tokens=-1 must be in"),
    ({"timescales": 3}, "timescales=3 must be 1 or 2"),
    ({"value_scale": 0.0}, "value_scale=0.0 must be positive"),
    ({"read_after_write": True}, "read_after_write=True must go with"),
    ({"chunk_mean": True, "rule": "delta"}, "chunk_mean=True must go with"),
    ({"chunk_mean": True, "num_slots": 2}, "chunk_mean=True must go with"),
    (
      {"chunk_mean": True, "write_population": "evicted"},
      "chunk_mean=True must go with",
    ),
  ],
)
def test_a_bad_spec_names_its_field(changes, message):
  with pytest.raises(ValueError, match=message):
    tensor_cache.Spec(**changes)


def test_inputs_that_do_not_fit():
  spec = evicted()
  state, inputs = fresh(spec, 4, 4), drawn(spec)
  with pytest.raises(ValueError, match="key has shape"):
    tensor_cache.chunk(
      state, inputs._replace(key=inputs.key[..., 1:]), spec=spec
    )
  with pytest.raises(
    ValueError, match="write_route is missing, but routed=True"
  ):
    slots = evicted(num_slots=2)
    tensor_cache.chunk(fresh(slots, 4, 4), inputs, spec=slots)
  with pytest.raises(
    ValueError, match=r"state\.window\.key has .* window_size=5"
  ):
    tensor_cache.chunk(state, inputs, spec=evicted(window_size=5))
  with pytest.raises(ValueError, match="needs key_dim=4 and value_dim=3 equal"):
    fresh(evicted(rule="wedge"), 4, 3)
  with pytest.raises(ValueError, match="at least float32"):
    tensor_cache.init_state(
      spec, batch=1, heads=1, key_dim=1, value_dim=1, dtype=jnp.bfloat16
    )
