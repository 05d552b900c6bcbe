"""Level 1: the reference is the paper's Tensor Cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import tensor_cache
from memcomp_kernels.tensor_cache import tile
from memcomp_kernels.testing import checks, memories, subjects

COMPILED = programs.of(tensor_cache)
MEMORY = memories.MEMORIES["tensor_cache"]
TIME = 13


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def scalars(*values):
  """A `[1, time, 1, 1]` array."""
  return jnp.array(values, jnp.float64)[None, :, None, None]


def fresh(spec, key_dim=1, value_dim=1, heads=1, batch=1):
  return tensor_cache.init_state(
    spec,
    batch=batch,
    heads=heads,
    key_dim=key_dim,
    value_dim=value_dim,
    dtype=jnp.float64,
  )


def holding(spec, memory):
  """A fresh state of scalars whose memory is `memory`."""
  state = fresh(spec)
  filled = jax.tree.map(lambda x: x + memory, state.memories)
  starts = None if state.starts is None else filled
  return state._replace(memories=filled, starts=starts)


def by_hand(keys, values, decay=0.5, rate=1.0, query=1.0):
  k, v = scalars(*keys), scalars(*values)
  full = jnp.ones_like(k)
  return tensor_cache.Inputs(
    query * full, k, v, jnp.log(decay * full), rate * full
  )


def drawn(spec, time=TIME, seed=0, dim=4):
  """Random inputs of one row and one head."""
  sizes = {"batch": 1, "heads": 1, "key_dim": dim, "value_dim": dim}
  return MEMORY.make_inputs(jax.random.key(seed), spec, time=time, **sizes)


def reads(spec, inputs, state=None):
  """What the memory adds, `[time, value]`, and the final memory."""
  k, v = inputs.key.shape[-1], inputs.value.shape[-1]
  state = fresh(spec, k, v) if state is None else state
  state, y = COMPILED.reference(state, inputs, spec=spec)
  return np.array(y[0, :, 0, v:]), np.array(state.memories.memory[0, 0, 0, 0])


def numbers(inputs):
  """q, k, v `[time, dim]`, lambda, eta `[time]` of one row and head."""
  q, k, v = (np.array(x[0, :, 0]) for x in inputs[:3])
  lam = np.exp(np.array(inputs.log_decay[0, :, 0, 0]))
  return q, k, v, lam, np.array(inputs.write_rate[0, :, 0, 0])


def evicted(**changes):
  spec = tensor_cache.Spec(window_size=4, write_population="evicted")
  return dataclasses.replace(spec, **changes)


def every(**changes):
  return dataclasses.replace(
    tensor_cache.Spec(window_size=6, chunk_size=4), **changes
  )


def test_eviction_by_hand():
  """Two tokens of window, scalars: arithmetic on paper."""
  inputs = by_hand([1, 2, 3, 4, 5], [1, 10, 100, 1000, 1e4])
  # Token 2 evicts token 0: A = 1 * 1. Token 3 evicts token 1: A = 0.5 * 1 +
  # 2 * 10 = 20.5. Token 4 evicts token 2: A = 10.25 + 300.
  r, A = reads(evicted(window_size=2), inputs)
  np.testing.assert_allclose(r[:, 0], [0, 0, 0, 1, 20.5])
  np.testing.assert_allclose(A, [[310.25]])
  r, A = reads(evicted(window_size=2, read_after_write=True), inputs)
  np.testing.assert_allclose(r[:, 0], [0, 0, 1, 20.5, 310.25])
  # One sink: token 0 stays, the ring holds one token.
  r, A = reads(evicted(window_size=2, sink_tokens=1), inputs)
  np.testing.assert_allclose(r[:, 0], [0, 0, 0, 20, 310])
  np.testing.assert_allclose(A, [[4155]])


def test_nothing_evicted_nothing_decays():
  inputs = by_hand([1, 1, 1], [5, 5, 5])
  spec = evicted(window_size=2)
  r, A = reads(spec, inputs, holding(spec, 8.0))
  np.testing.assert_allclose(r[:, 0], [8, 8, 8])
  np.testing.assert_allclose(A, [[8 * 0.5 + 5]])


def test_delta_predicts_from_the_memory_before_its_decay():
  spec = evicted(window_size=1, rule="delta")
  inputs = by_hand([1, 1], [6, 6], decay=0.5, rate=0.5)
  # The error is 6 - 2 = 4, not 6 - 0.5 * 2: A = 0.5 * 2 + 0.5 * 4.
  _, A = reads(spec, inputs, holding(spec, 2.0))
  np.testing.assert_allclose(A, [[3.0]])


@pytest.mark.parametrize("sinks", [0, 2])
def test_local_attention_is_a_softmax_over_the_window(sinks):
  spec = evicted(sink_tokens=sinks)
  inputs = drawn(spec)
  q, k, v, _, _ = numbers(inputs)
  _, y = COMPILED.reference(fresh(spec, 4, 4), inputs, spec=spec)
  for t in range(TIME):
    seen = [j for j in range(t + 1) if j < sinks or t - j < 4 - sinks]
    p = np.exp(k[seen] @ q[t] / np.sqrt(4))
    expected = p / p.sum() @ v[seen]
    np.testing.assert_allclose(y[0, t, 0, :4], expected, rtol=1e-12)


@pytest.mark.parametrize("rule", ["outer", "delta", "wedge"])
def test_up_to_the_window_it_is_causal_attention(rule):
  inputs = drawn(evicted(rule=rule), time=4)
  r, A = reads(evicted(rule=rule), inputs)
  assert not r.any() and not A.any()


def written(k, u, rule):
  contribution = np.outer(k, u)
  return contribution - contribution.T if rule == "wedge" else contribution


@pytest.mark.parametrize("rule", ["outer", "delta", "wedge"])
def test_the_streaming_step_as_a_loop(rule):
  """(3), (4), (14) in numpy, over what left the window."""
  spec = evicted(rule=rule)
  inputs = drawn(spec)
  q, k, v, lam, eta = numbers(inputs)
  A, expected = np.zeros((4, 4)), []
  for t in range(TIME):
    expected.append(q[t] @ A)
    if t >= 4:
      e = t - 4
      u = v[e] - k[e] @ A if rule == "delta" else v[e]
      A = lam[t] * A + eta[t] * written(k[e], u, rule)
  r, final = reads(spec, inputs)
  np.testing.assert_allclose(r, expected, atol=1e-13)
  np.testing.assert_allclose(final, A, atol=1e-13)


@pytest.mark.parametrize("rule", ["outer", "delta", "wedge"])
def test_the_training_forward_as_a_weighted_sum(rule):
  """(8), (9): A <- lambda^C A + eta sum_i lambda^(C-i) k_i (x) u_i."""
  spec = every(rule=rule)
  inputs = drawn(spec, time=9)
  constant = jnp.ones_like(inputs.log_decay)
  inputs = inputs._replace(
    log_decay=jnp.log(0.9) * constant, write_rate=0.3 * constant
  )
  q, k, v, _, _ = numbers(inputs)
  A, expected = np.zeros((4, 4)), []
  for start in range(0, 9, 4):
    here = range(start, min(start + 4, 9))
    new = 0.9 ** len(here) * A
    for i, t in enumerate(here):
      expected.append(q[t] @ A)
      u = v[t] - k[t] @ A if rule == "delta" else v[t]
      new += 0.3 * 0.9 ** (len(here) - 1 - i) * written(k[t], u, rule)
    A = new
  r, final = reads(spec, inputs)
  np.testing.assert_allclose(r, expected, atol=1e-13)
  np.testing.assert_allclose(final, A, atol=1e-13)


def test_the_scan_of_a_chunk_is_the_loop_of_outer_writes():
  spec = every()
  inputs = drawn(spec)
  _, k, v, lam, eta = numbers(inputs)
  A = np.zeros((4, 4))
  for t in range(TIME):
    A = lam[t] * A + eta[t] * np.outer(k[t], v[t])
  np.testing.assert_allclose(reads(spec, inputs)[1], A, atol=1e-13)
  assert np.abs(reads(every(rule="delta"), inputs)[1] - A).max() > 0.01


def test_chunks_of_one_make_the_delta_rule_exact():
  inputs = drawn(every())
  _, k, v, lam, eta = numbers(inputs)
  A = np.zeros((4, 4))
  for t in range(TIME):
    A = lam[t] * A + eta[t] * np.outer(k[t], v[t] - k[t] @ A)
  exact = reads(every(rule="delta", chunk_size=1), inputs)[1]
  np.testing.assert_allclose(exact, A, atol=1e-13)
  stale = reads(every(rule="delta"), inputs)[1]
  assert np.linalg.norm(stale - A) > 0.01 * np.linalg.norm(A)


def test_chunk_mean_by_hand():
  """Means 2 and 30 of a chunk of two, then a third token alone."""
  spec = every(chunk_size=2, chunk_mean=True)
  inputs = by_hand([1, 3, 5], [20, 40, 7], rate=0.1)
  r, A = reads(spec, inputs, holding(spec, 8.0))
  # 0.5 * 8 + 0.1 * 2 * 30 = 10; the short chunk: 0.5 * 10 + 0.1 * 5 * 7.
  np.testing.assert_allclose(r[:, 0], [8, 8, 10])
  np.testing.assert_allclose(A, [[8.5]])


def test_chunk_mean_has_spurious_terms():
  """(7): mean(k) (x) mean(v) is the sum over all pairs, over C^2."""
  inputs = drawn(every(), time=4)
  _, k, v, _, eta = numbers(inputs)
  mean = reads(every(chunk_mean=True), inputs)[1]
  exact = reads(every(), inputs)[1]
  pairs = sum(np.outer(k[i], v[j]) for i in range(4) for j in range(4))
  np.testing.assert_allclose(mean, eta[3] * pairs / 16, atol=1e-13)
  assert np.linalg.norm(mean - exact) > 0.3 * np.linalg.norm(exact)


@pytest.mark.parametrize("spec", [evicted(rule="wedge"), every(rule="wedge")])
def test_the_wedge_memory_is_antisymmetric(spec):
  _, A = reads(spec, drawn(spec))
  assert np.abs(A).max() > 0.1
  np.testing.assert_allclose(A, -A.T, atol=1e-14)


def test_a_wedge_read_by_hand():
  """q (k (x) v - v (x) k) = <q, k> v - <q, v> k."""
  spec = evicted(window_size=1, rule="wedge", read_after_write=True)
  inputs = drawn(spec, time=2)
  q, k, v, _, eta = numbers(inputs)
  expected = eta[1] * ((q[1] @ k[0]) * v[0] - (q[1] @ v[0]) * k[0])
  np.testing.assert_allclose(reads(spec, inputs)[0][1], expected, atol=1e-14)


@pytest.mark.parametrize("after", [False, True])
def test_a_token_is_invisible_for_one_step(after):
  """At t the window ends at t - W + 1; the memory begins at t - W - 1."""
  spec = evicted(read_after_write=after)
  inputs = drawn(spec, time=9)

  def last(value):
    y = COMPILED.reference(
      fresh(spec, 4, 4), inputs._replace(value=value), spec=spec
    )[1]
    return y[0, -1, 0]

  sensitive = np.abs(jax.jacobian(last)(inputs.value)).max(axis=(1, 3, 4))
  local, memory = (part.any(axis=0) for part in (sensitive[:4], sensitive[4:]))
  np.testing.assert_array_equal(local, np.arange(9) >= 5)
  np.testing.assert_array_equal(memory, np.arange(9) <= (4 if after else 3))


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


@pytest.mark.parametrize(
  "name",
  rotation.cases(
    ["evicted-outer", "all-mean", "all-slots-delta-timescales"],
    ["all-slots-delta-timescales"],
  ),
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


def test_a_chunk_may_be_longer_than_the_window():
  """Scalars: nothing is seen of tokens 0 and 1 before token 3."""
  inputs = by_hand([1, 2, 3, 4, 5], [1, 10, 100, 1000, 1e4])
  spec = every(window_size=1, chunk_size=3)
  _, y = COMPILED.reference(fresh(spec, 1, 1), inputs, spec=spec)
  # Of keys 1, 2, 3 with a decay of .5: 0.25 * 1 + 0.5 * 20 + 300.
  memory, local = 310.25, [1, 10, 100, 1000, 1e4]
  np.testing.assert_allclose(y[0, :, 0, 0], local)
  np.testing.assert_allclose(y[0, :, 0, 1], [0, 0, 0, memory, memory])


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
