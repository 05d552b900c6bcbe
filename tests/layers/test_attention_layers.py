"""Key-Value Means and softmax attention as layers: knobs, sizes, mistakes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcomp.layers import key_value_means, softmax_attention

KVM = key_value_means.KeyValueMeansConfig(
  heads=2,
  key_dim=8,
  value_dim=8,
  rotary_dim=4,
  chunk_size=4,
  budget="power",
  budget_rows=4,
  budget_scale=1.5,
  max_length=64,
)
SOFTMAX = softmax_attention.SoftmaxAttentionConfig(
  heads=2, key_dim=8, value_dim=8, rotary_dim=4, window_size=8
)


def own_budget(tokens):
  """A user's budget: a row every three tokens."""
  return max(4, tokens // 3)


def run(config, seed=0):
  """Outputs of a layer on 30 random tokens; its learned numbers are moved."""
  module = {
    key_value_means.KeyValueMeansConfig: key_value_means.KeyValueMeans,
    softmax_attention.SoftmaxAttentionConfig: (
      softmax_attention.SoftmaxAttention
    ),
  }[type(config)]

  @jax.jit
  def outputs():
    layer = module.from_config(config, 16, std=0.3, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(layer)
    layer = nnx.merge(graph, jax.tree.map(lambda x: x + 0.1, params))
    x = jax.random.normal(jax.random.key(1), (2, 30, 16))
    first = jax.random.normal(jax.random.key(2), (2, 30, 16))
    state = layer.init_state(2, 30)
    return layer(x, state, first_value=first, max_position=0)[0]

  return np.asarray(outputs())


@pytest.fixture(scope="module")
def base():
  return {"kvm": run(KVM), "softmax": run(SOFTMAX)}


KNOBS = [
  ("kvm", {"sink_rows": 0}),
  ("kvm", {"temperatures": False}),
  ("kvm", {"value_radius": False}),
  ("kvm", {"merge_gate": False}),
  ("kvm", {"gate_appends": True}),
  ("kvm", {"budget": "fixed"}),
  ("kvm", {"budget": "saturating", "budget_rows": 8}),
  ("kvm", {"budget": f"{__name__}:own_budget"}),
  ("kvm", {"normalize_key": "l2"}),
  ("kvm", {"key_norm_eps": 1.0}),
  ("kvm", {"rotary_reversed": True}),
  ("softmax", {"kv_heads": 1}),
  ("softmax", {"window_size": 0}),
  ("softmax", {"sink_tokens": 2}),
  ("softmax", {"sink_tokens": 2, "sink_positions": "text"}),
  ("softmax", {"chunk_size": 4}),
  ("softmax", {"token_shift": True}),
  ("softmax", {"value_residual": "scalar"}),
  ("softmax", {"value_residual": "static"}),
  ("softmax", {"value_residual": "dynamic"}),
  ("softmax", {"rotary_scale": 4.0}),
  ("softmax", {"rotary_frequencies": "inclusive"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "change"), KNOBS, ids=str)
def test_every_knob_is_one_override(name, change, base):
  config = dataclasses.replace({"kvm": KVM, "softmax": SOFTMAX}[name], **change)
  y = run(config)
  assert np.isfinite(y).all()
  assert np.abs(y - base[name]).max() > 1e-3


@pytest.mark.parametrize(
  ("config", "change"),
  [
    (KVM, {"budget": "linear"}),
    (KVM, {"budget": "no_such_module:rows"}),
    (KVM, {"sink_rows": 4}),
    (KVM, {"chunk_size": 0}),
    (KVM, {"rotary_dim": 10}),
    (KVM, {"budget_rows": 0}),
    (SOFTMAX, {"sink_tokens": 8}),
    (SOFTMAX, {"sink_positions": "cache"}),
    (SOFTMAX, {"rotary_dim": 3}),
    (SOFTMAX, {"value_residual": "all"}),
    (SOFTMAX, {"normalize_key": "rms"}),
    (SOFTMAX, {"heads": -1}),
    (SOFTMAX, {"kv_heads": 3}),
    (SOFTMAX, {"kv_heads": -1}),
    (SOFTMAX, {"max_length": 0}),
  ],
  ids=str,
)
def test_mistakes_are_named(config, change):
  with pytest.raises(ValueError, match=f"{next(iter(change))}="):
    dataclasses.replace(config, **change).validate()


def test_a_budget_that_shrinks():
  with pytest.raises(ValueError, match=r"budget=.*shrink"):
    dataclasses.replace(KVM, budget=f"{__name__}:shrinking").validate()


def shrinking(tokens):
  """A mistake."""
  return 100 - tokens


def test_window_that_is_no_multiple_of_the_block():
  with pytest.raises(
    ValueError, match="chunk_size=3 must divide window_size=8"
  ):
    dataclasses.replace(SOFTMAX, chunk_size=3).validate()


def test_grouped_heads_decode_as_they_train():
  """Token by token as in one call, with all that a projection may do."""
  config = dataclasses.replace(
    SOFTMAX,
    kv_heads=1,
    token_shift=True,
    value_residual="dynamic",
    normalize_key="layer",
  )
  x = jax.random.normal(jax.random.key(1), (2, 12, 16))
  first = jax.random.normal(jax.random.key(2), (2, 12, 8))

  @jax.jit
  def run(x, first):
    layer = softmax_attention.SoftmaxAttention.from_config(
      config, 16, std=0.3, rngs=nnx.Rngs(0)
    )

    def body(state, given):
      x, first = given
      y, state = layer.step(x, state, first_value=first)
      return state, y

    given = jnp.moveaxis(x, 1, 0), jnp.moveaxis(first, 1, 0)
    by_step = jax.lax.scan(body, layer.init_state(2), given)[1]
    whole, _ = layer(x, layer.init_state(2), first_value=first)
    return jnp.moveaxis(by_step, 0, 1), whole

  np.testing.assert_allclose(*run(x, first), rtol=1e-5, atol=1e-6)


def test_a_new_segment_forgets_what_the_state_saw():
  """Whether the state is known to be fresh, as in training, or holds tokens."""

  @jax.jit
  def run(x):
    layer = softmax_attention.SoftmaxAttention.from_config(
      SOFTMAX, 16, std=0.3, rngs=nnx.Rngs(0)
    )
    start = layer.init_state(1)
    _, state = layer(x[:, :4], start)
    ids = jnp.full((1, 6), 2)
    found = layer(x[:, 4:], state, segment_ids=ids)
    fresh = layer(x[:, 4:], start, segment_ids=ids, max_position=0)
    return found, fresh, layer(x[:, 4:], start)[0]

  x = jax.random.normal(jax.random.key(1), (1, 10, 16))
  (y, after), (z, expected), alone = run(x)
  np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(z, alone, rtol=1e-5, atol=1e-6)
  assert int(after.memory.position[0]) == 6
  np.testing.assert_allclose(after.memory.keys, expected.memory.keys, rtol=1e-5)


def test_streaming_llm_as_its_paper_says():
  """A list of keys as they were projected, rotated anew for every token.

  Each by its place in the list: StreamingLLM (arXiv 2309.17453), section 3.2.
  """
  config = dataclasses.replace(SOFTMAX, sink_tokens=2, rotary_dim=8)

  @jax.jit
  def run(x):
    layer = softmax_attention.SoftmaxAttention.from_config(
      config, 16, std=0.3, rngs=nnx.Rngs(0)
    )

    def body(state, x):
      y, state = layer.step(x, state)
      return state, y

    y, _ = layer(x, layer.init_state(1), max_position=0)
    # One token more than fits the window.
    short, _ = layer(x[:, :9], layer.init_state(1), max_position=0)
    by_step = jax.lax.scan(body, layer.init_state(1), jnp.moveaxis(x, 1, 0))[1]
    parts = layer.projection.query, layer.projection.key, layer.projection.value
    out = layer.out(jnp.eye(16))
    projected = [part(x)[0] for part in parts]
    return (y[0], short[0], by_step[:, 0]), projected, out

  found, projected, out = run(jax.random.normal(jax.random.key(1), (1, 30, 16)))
  q, k, v = (np.asarray(a).reshape(30, 2, 8) for a in projected)

  def rotate(a, place):
    angle = place / 10_000 ** (np.arange(4) / 4)
    turned = (a[..., 0::2] + 1j * a[..., 1::2]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], -1).reshape(a.shape)

  cache, expected = [], []
  for t in range(30):
    cache.append(t)
    if len(cache) > 8:
      del cache[2]  # the oldest that is no sink
    query = rotate(q[t], len(cache) - 1)
    keys = np.stack([rotate(k[j], place) for place, j in enumerate(cache)])
    p = np.exp(np.einsum("hd,jhd->hj", query, keys) / np.sqrt(8))
    p /= p.sum(-1, keepdims=True)
    expected.append(np.einsum("hj,jhd->hd", p, v[cache]).reshape(-1) @ out)
  for y in found:
    np.testing.assert_allclose(y, expected[: len(y)], rtol=1e-4, atol=1e-5)


def test_sizes_by_hand():
  # 30 tokens: chunks of 4, a window of 2 chunks, 16 + 1 floats a row or token;
  # 1.5 sqrt(28) = 7.9: 7 rows while chunk 7 is read.
  assert KVM.state_floats(30) == 2 * (7 + 8) * 17
  assert SOFTMAX.state_floats(30) == 2 * 8 * 16
  assert SOFTMAX.state_floats(5) == 2 * 5 * 16
  grouped = dataclasses.replace(SOFTMAX, kv_heads=1)
  assert grouped.state_floats(30) == 8 * 16
  assert grouped.memory_flops(30) == SOFTMAX.memory_flops(30)
  full = dataclasses.replace(SOFTMAX, window_size=0)
  # 1 + 2 + ... + 10 scores of 8 and sums of 8, over 10 tokens.
  assert full.memory_flops(10) == 2 * 2 * 16 * 55 // 10


def test_state_agrees_with_the_figure():
  for config, module in (
    (KVM, key_value_means.KeyValueMeans),
    (SOFTMAX, softmax_attention.SoftmaxAttention),
    (
      dataclasses.replace(SOFTMAX, kv_heads=1),
      softmax_attention.SoftmaxAttention,
    ),
  ):
    layer = module.from_config(config, 16, std=0.3, rngs=nnx.Rngs(0))
    memory = layer.init_state(1, 30).memory
    names = {"temperatures", "norm_scale", "norm_bias"}
    sizes = {
      name: x.size
      for name, x in memory._asdict().items()
      if jnp.issubdtype(x.dtype, jnp.floating) and name not in names
    }
    assert sum(sizes.values()) == config.state_floats(30)


@pytest.mark.parametrize("temperatures", [True, False])
def test_a_packed_text_is_the_text_alone(temperatures):
  """Constants of the memory hold for every text, learned or not."""
  config = dataclasses.replace(KVM, temperatures=temperatures)
  layer = key_value_means.KeyValueMeans.from_config(
    config, 16, std=0.3, rngs=nnx.Rngs(1)
  )
  x = jax.random.normal(jax.random.key(0), (1, 20, 16))
  ids = jnp.where(jnp.arange(20) < 6, 1, 2)[None]
  y, state = nnx.jit(
    lambda layer: layer(x, layer.init_state(1), segment_ids=ids)
  )(layer)
  alone, after = nnx.jit(lambda layer: layer(x[:, 6:], layer.init_state(1)))(
    layer
  )
  np.testing.assert_allclose(y[:, 6:], alone, atol=1e-5)
  np.testing.assert_array_equal(
    state.memory.temperatures, after.memory.temperatures
  )


@pytest.mark.parametrize("time", [1, 4, 6])
def test_sinks_of_a_text_that_is_no_longer(time):
  """All tokens are kept, so sinks change nothing."""

  def outputs(sink_tokens):
    layer = softmax_attention.SoftmaxAttention(
      16, heads=2, sink_tokens=sink_tokens, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (2, time, 16))
    y = layer(x, layer.init_state(2, time))[0]
    np.testing.assert_allclose(layer(x), y, atol=1e-6)
    return y

  np.testing.assert_allclose(outputs(4), outputs(0), atol=1e-6)
