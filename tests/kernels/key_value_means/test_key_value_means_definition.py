"""Level 1: the reference is the paper's Key-Value Means."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import key_value_means
from memcomp_kernels.key_value_means import (
  budgets,
  capacity,
  resize,
  rows,
  xla_chunked,
)
from memcomp_kernels.testing import (
  checks,
  errors,
  gradients,
  memories,
  subjects,
)

pytestmark = pytest.mark.usefixtures("float64")

COMPILED = programs.of(key_value_means)
MEMORY = memories.MEMORIES["key_value_means"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}
BUDGETS = ("power", "fixed", "saturating", "user")


def make(spec, time, **changes):
  sizes = SIZES | changes
  state = MEMORY.make_state(jax.random.key(1), spec, **sizes)
  return state, MEMORY.make_inputs(jax.random.key(0), spec, time=time, **sizes)


def all_states(spec, state, inputs):
  """The states after 1, 2, ... tokens, stacked, and the outputs."""

  def body(state, x):
    state, y = key_value_means.step(state, x, spec=spec)
    return state, (state, y)

  by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
  _, (states, outputs) = jax.jit(lambda *a: jax.lax.scan(body, *a))(
    state, by_time
  )
  return states, jnp.moveaxis(outputs, 0, 1)


@pytest.mark.parametrize("name", rotation.cases(BUDGETS, ["power"]))
def test_live_rows_follow_the_schedule(name):
  spec = MEMORY.specs[name]
  states, _ = all_states(spec, *make(spec, 30))
  live = spec.live_rows(29 // spec.chunk_size)
  expected = [live[t // spec.chunk_size] for t in range(30)]
  np.testing.assert_array_equal(states.length, np.stack([expected] * 2, axis=1))
  assert len(set(expected)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETS)
def test_prefill_is_decode(name):
  """At lengths below a chunk, below the window, and inside a chunk."""
  spec = MEMORY.specs[name]
  state, inputs = make(spec, 30)
  states, outputs = all_states(spec, state, inputs)
  for time in (2, 5, 27) if name == "power" else (2, 27):
    chunk = jax.jit(
      lambda *a: key_value_means.chunk(*a, spec=spec, max_position=0)
    )
    got = chunk(state, jax.tree.map(lambda x: x[:, :time], inputs))  # noqa: B023
    want = jax.tree.map(lambda x: x[time - 1], states)  # noqa: B023
    errors.assert_close(got, (want, outputs[:, :time]), 1e-10, f"{time}")


def test_prepared_keys():
  """r channels zeroed, then a layer norm of all: they are not zero (1.2)."""
  spec = MEMORY.specs["power"]
  state, inputs = make(spec, 9)
  final, _ = COMPILED.reference(state, inputs, spec=spec)
  key = np.array(inputs.key[:, 3])
  key[..., :2] = 0
  centred = key - key.mean(-1, keepdims=True)
  key = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
  key = key * state.norm_scale + state.norm_bias
  np.testing.assert_allclose(final.keys[:, :, 3], key, rtol=1e-12)
  np.testing.assert_allclose(
    final.radii[:, :, 3], np.linalg.norm(inputs.value[:, 3], axis=-1)
  )


def test_up_to_the_window_it_is_causal_attention():
  spec = MEMORY.specs["power"]
  state, inputs = make(spec, spec.window)
  final, y = COMPILED.reference(state, inputs, spec=spec)
  tau = np.array(state.temperatures[..., 1])[..., None, None]
  logits = np.einsum("bqhd,bkhd->bhqk", inputs.query, inputs.key)
  logits = tau * logits / np.sqrt(5)
  weights = np.exp(logits) * np.tri(spec.window)
  weights /= weights.sum(-1, keepdims=True)
  expected = np.einsum("bhqk,bkhd->bqhd", weights, inputs.value)
  np.testing.assert_allclose(y, expected, rtol=1e-12)
  np.testing.assert_array_equal(final.length, 0)


@pytest.mark.slow
def test_the_sink_is_never_merged_into():
  """Over many keys like it; without a sink its row does change."""
  changed = {}
  for sink_rows in (0, 1, 2):
    spec = dataclasses.replace(MEMORY.specs["saturating"], sink_rows=sink_rows)
    states, _ = all_states(spec, *make(spec, 40))
    begun, end = states.keys[4], states.keys[-1]
    moved = jnp.any(begun != end, axis=(0, 1, 3))
    changed[sink_rows] = moved[:4].tolist()
  assert changed[0][0]
  assert not changed[1][0]
  assert changed[1][1]
  assert not any(changed[2][:2])


@pytest.mark.slow
def test_the_scale_of_a_row_is_not_read():
  """(sK, sV) of a row times any positive number, but for LN's eps."""
  spec = dataclasses.replace(MEMORY.specs["power"], norm_eps=1e-14)
  state, inputs = make(spec, 30)
  state, _ = COMPILED.reference(state, inputs, spec=spec)
  scale = jnp.exp(jax.random.normal(jax.random.key(7), state.radii.shape))
  scaled = state._replace(
    keys=scale[..., None] * state.keys, values=scale[..., None] * state.values
  )
  # Two tokens from position 30 on: inside a chunk.
  token = jax.tree.map(lambda x: x[:, :2], inputs)
  want, got = (
    COMPILED.reference(s, token, spec=spec)[1] for s in (state, scaled)
  )
  np.testing.assert_allclose(got, want, rtol=1e-10)
  without = dataclasses.replace(spec, value_radius=False)
  want, got = (
    COMPILED.reference(s, token, spec=without)[1] for s in (state, scaled)
  )
  assert jnp.max(jnp.abs(got - want)) > 0.01


def test_gates_weigh_merges_only():
  """With room for every token they do nothing; otherwise they do."""
  for budget, same in (
    (lambda tokens: tokens, True),
    (lambda tokens: 4, False),
  ):
    spec = dataclasses.replace(MEMORY.specs["no-sink"], budget=budget)
    state, inputs = make(spec, 30)
    other = inputs._replace(merge_gate=inputs.merge_gate**2)
    first, second = (
      COMPILED.reference(state, x, spec=spec)[1] for x in (inputs, other)
    )
    assert bool(jnp.all(first == second)) == same


def chunk_seen(spec, seen):
  return functools.partial(key_value_means.chunk, spec=spec, max_position=seen)


@pytest.mark.slow
def test_seen_changes_nothing():
  spec = MEMORY.specs["power"]
  state, inputs = make(spec, 28)
  sizes = {"capacity": state.keys.shape[2], "time": 28, "num_tiles": 7}
  assert len(xla_chunked.stages(spec, max_position=0, **sizes)) == 2
  assert len(xla_chunked.stages(spec, max_position=None, **sizes)) == 1
  subjects.assert_agree(
    gradients.value_and_gradients(chunk_seen(spec, 0), (state, inputs)),
    gradients.value_and_gradients(chunk_seen(spec, None), (state, inputs)),
    "fresh",
  )


@pytest.mark.slow
def test_seen_changes_nothing_in_packed_rows():
  """Nor in rows that are not live, beyond a stage's slice or within."""
  spec = MEMORY.specs["power"]
  state, inputs = make(spec, 28)

  def filled(seed):
    noise = jax.random.normal(jax.random.key(seed), state.keys.shape)
    return state._replace(keys=noise, radii=noise[..., 0])

  ids = np.repeat([[1, 2, 0, 3], [4, 4, 4, 4]], [3, 18, 2, 5], axis=1)
  ids = jnp.asarray(ids, jnp.int32)
  got, want = (
    jax.jit(functools.partial(function, spec=spec, segment_ids=ids, **seen))(
      filled(2), inputs, reset_state=filled(3)
    )
    for function, seen in (
      (key_value_means.chunk, {"max_position": 0}),
      (key_value_means.reference, {}),
    )
  )
  errors.assert_close(got, want, 1e-12, "packed")


@pytest.mark.slow
def test_seen_of_a_state_under_way():
  spec = MEMORY.specs["power"]
  state, inputs = make(spec, 48)
  head = jax.tree.map(lambda x: x[:, :22], inputs)
  tail = jax.tree.map(lambda x: x[:, 22:], inputs)
  middle, _ = jax.jit(chunk_seen(spec, 0))(state, head)
  got, want = (
    jax.jit(chunk_seen(spec, seen))(middle, tail) for seen in (22, None)
  )
  errors.assert_close(got, want, 1e-12, "tail")
  with pytest.raises(ValueError, match="given bound, max_position=21"):
    key_value_means.chunk(middle, tail, spec=spec, max_position=21)
  call = {
    "segment_ids": jnp.ones(tail.query.shape[:2], jnp.int32),
    "max_position": 21,
  }
  with pytest.raises(ValueError, match="reset_state has seen 22 tokens"):
    key_value_means.chunk(state, tail, spec=spec, reset_state=middle, **call)


def test_stages_follow_the_live_rows():
  spec = key_value_means.Spec(budget=budgets.PowerLawBudget())
  rows = capacity(spec, 32768)

  def stages(**changes):
    usual = {
      "capacity": rows,
      "max_position": 0,
      "time": 32768,
      "num_tiles": 128,
    }
    return xla_chunked.stages(spec, **(usual | changes))

  found = stages()
  assert [s.rows for s in found] == [512, 1024, 2048, rows]
  assert found[0].start == 0
  assert found[-1].stop == 128
  live = spec.live_rows(127)
  assert all(live[i] <= s.rows for s in found for i in range(*s[1:]))
  work = sum(s.rows * (s.stop - s.start) for s in found)
  assert work < 1.35 * sum(live)
  fixed = xla_chunked.stages(
    key_value_means.Spec(),
    capacity=256,
    max_position=0,
    time=32768,
    num_tiles=128,
  )
  assert fixed == [(256, 0, 128)]


@pytest.mark.slow
def test_rows_are_added_by_product_elsewhere(monkeypatch):
  monkeypatch.setattr(rows, "adds_by_index", lambda: False)
  spec = MEMORY.specs["power"]
  checks.check_truth(subjects.Subject(MEMORY, spec, "xla_chunked"), 18)


@pytest.mark.slow
def test_capacity_caps_the_budget_and_grows():
  spec = MEMORY.specs["user"]
  _, inputs = make(spec, 40)
  small = key_value_means.init_state(spec, length=16, **SIZES)
  rows = small.keys.shape[2]
  assert rows == capacity(spec, 16) == 5
  head = jax.tree.map(lambda x: x[:, :30], inputs)
  tail = jax.tree.map(lambda x: x[:, 30:], inputs)
  capped, _ = COMPILED.reference(small, head, spec=spec)
  np.testing.assert_array_equal(capped.length, rows)
  errors.assert_close(
    COMPILED.chunk(small, head, spec=spec, max_position=0)[0],
    capped,
    1e-5,
    "capped",
  )
  # With room again it catches up, four rows a chunk.
  grown = resize(capped, 20)
  assert grown.values.shape[2] == 20
  want = COMPILED.reference(grown, tail, spec=spec)
  assert want[0].length.tolist() == [13, 13]  # B(36) = 13
  errors.assert_close(
    COMPILED.chunk(grown, tail, spec=spec, max_position=30), want, 1e-5, "grown"
  )
  with pytest.raises(ValueError, match="capacity=4 must be at least 5"):
    resize(capped, 4)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("chunk_size", 0),
    ("window_chunks", 0),
    ("sink_rows", -1),
    ("sink_rows", 256),
    ("rotary_dim", -1),
    ("max_length", 255),
    ("norm_eps", 0.0),
    ("radius_eps", 0.0),
    ("budget", 256),
    ("budget", budgets.FixedBudget(0)),
    ("budget", lambda tokens: 1000 - tokens // 1000),
    ("budget", lambda tokens: 300.5),
    ("budget", lambda tokens: None),
    ("budget", lambda tokens: float("inf")),
  ],
)
def test_spec_names_the_field_out_of_range(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    key_value_means.Spec(**{field: value})


def test_an_unhashable_budget_is_named():
  class Listed(list):
    def __call__(self, tokens):
      return 256

  with pytest.raises(ValueError, match=r"budget=.* hashable"):
    key_value_means.Spec(budget=Listed())


def test_chunk_names_what_does_not_fit():
  spec = MEMORY.specs["power"]
  state, inputs = make(spec, 3)
  with pytest.raises(ValueError, match=r"merge_gate has shape .* expected"):
    key_value_means.chunk(
      state, inputs._replace(merge_gate=inputs.key), spec=spec
    )
  with pytest.raises(ValueError, match=r"state\.window_keys has shape"):
    key_value_means.chunk(state, inputs, spec=MEMORY.specs["fixed"])
  with pytest.raises(ValueError, match="has 3 rows"):
    key_value_means.chunk(resize(state, 3), inputs, spec=spec)
  with pytest.raises(ValueError, match="rotary_dim=64"):
    key_value_means.init_state(
      key_value_means.Spec(), batch=1, heads=1, key_dim=64, value_dim=1
    )
  with pytest.raises(ValueError, match="length=0"):
    key_value_means.init_state(spec, length=0, **SIZES)
  with pytest.raises(ValueError, match="at least float32"):
    key_value_means.init_state(spec, dtype=jnp.bfloat16, **SIZES)
