"""A swap keeps what it says it keeps."""

import dataclasses

import jax
import numpy as np
import pytest
import runs
from flax import nnx

from memcomp import config as config_lib
from memcomp import errors
from memcomp.convert import swap
from memcomp.export import names
from memcomp.layers import linear_attention, softmax_attention, trellis
from memcomp.models import abstract, decoder

SIZES = {"heads": 2, "key_dim": 8, "value_dim": 8}
GROUPED = softmax_attention.SoftmaxAttentionConfig(
  **SIZES, kv_heads=1, rotary_dim=4, projection_bias=True
)
LINEAR = linear_attention.LinearAttentionConfig(**SIZES)
TRELLIS = trellis.TrellisConfig(**SIZES, num_slots=4, chunk_size=4)
MODEL = decoder.DecoderConfig(
  vocab_size=24,
  d_model=16,
  num_layers=4,
  mlp_dim=8,
  mixers={"memory": GROUPED},
  tied_embeddings=False,
)
TOKENS = np.random.default_rng(0).integers(0, 24, (2, 9))


@pytest.fixture(scope="module")
def params():
  return runs.random_params(config_lib.Config(name="old", model=MODEL))


@pytest.mark.slow
def test_parameters_as_flax_gives_them(params):
  state = nnx.state(decoder.Decoder(MODEL, rngs=nnx.Rngs(0)), nnx.Param)
  found = swap.swap(MODEL, state, GROUPED)
  ours = names.flatten(MODEL, abstract.plain(state))
  jax.tree.map(
    np.testing.assert_array_equal, names.flatten(MODEL, found.params), ours
  )


def logits_of(config, params):
  model = abstract.merge(abstract.model_of(config).graphdef, params)
  return jax.jit(model.__call__)(TOKENS)


@pytest.mark.slow
def test_heads_that_were_shared_are_repeated(params):
  """So that the same attention with a head each is the same function."""
  full = dataclasses.replace(GROUPED, kv_heads=0)
  found = swap.swap(MODEL, params, full)
  assert len(found.copied) == 4 * 7  # and its three biases
  expected = logits_of(MODEL, params)
  np.testing.assert_allclose(
    logits_of(found.config, found.params), expected, atol=1e-5, rtol=0
  )
  assert expected.std() > 0.5


@pytest.mark.parametrize("fields", ["", ",kv_heads=1"])
def test_a_window_of_the_whole_text_is_the_same_function(params, fields):
  """With heads that stay shared, too; nothing has to be asked for."""
  odd = {"rotary_scale": 4.0, "rotary_frequencies": "inclusive"}
  old = dataclasses.replace(GROUPED, **odd, rotary_reversed=True)
  model = dataclasses.replace(MODEL, mixers={"memory": old})
  new = swap.parse(f"softmax_attention:window_size=64{fields}", old)
  found = swap.swap(model, params, new, fresh=_drawn(model, new))
  np.testing.assert_allclose(
    logits_of(found.config, found.params),
    logits_of(model, params),
    atol=1e-5,
    rtol=0,
  )
  assert len(found.copied) == 4 * 7
  assert not found.left


def _drawn(model, mixer):
  changed = swap.config_with(model, mixer, range(model.num_layers))
  return runs.random_params(config_lib.Config(name="new", model=changed))


def test_what_is_no_mixer_stays(params):
  changed = swap.config_with(MODEL, TRELLIS, range(4))
  fresh = runs.random_params(config_lib.Config(name="new", model=changed))
  found = swap.swap(MODEL, params, TRELLIS, fresh=fresh)
  assert found.config.pattern == "trellis"
  assert found.config.mixers == {"trellis": TRELLIS}
  ours = names.flatten(MODEL, params)
  theirs = names.flatten(found.config, found.params)
  for name, array in theirs.items():
    if ".mixer." not in name:
      np.testing.assert_array_equal(array, ours[name], name)
  for depth in range(4):
    old, new = f"layers.{depth}.mixer.projection", f"layers.{depth}.mixer"
    for ours_, theirs_ in (
      (f"{new}.out.weight", f"{new}.out.weight"),
      # One head of keys and values for both heads.
      (f"{old}.key.weight", f"{new}.query_key.weight"),
      (f"{old}.value.weight", f"{new}.value.weight"),
    ):
      expected = ours[ours_]
      if expected.shape[0] == 8:
        expected = np.concatenate([expected, expected])
      np.testing.assert_array_equal(theirs[theirs_], expected, theirs_)
      assert theirs_ in found.copied
  assert len(found.copied) == 4 * 3
  # A shared query and key has no place for the query, nor for biases.
  lost = ("query.weight", "query.bias", "key.bias", "value.bias")
  assert set(found.left) == {
    f"layers.{depth}.mixer.projection.{array}"
    for depth in range(4)
    for array in lost
  }


def test_some_layers(params):
  changed = swap.config_with(MODEL, LINEAR, [1, 2])
  fresh = runs.random_params(config_lib.Config(name="new", model=changed))
  found = swap.swap(MODEL, params, LINEAR, layers=[1, 2], fresh=fresh)
  assert found.config.pattern == "1*memory,2*linear_attention,1*memory"
  assert found.config.mixers["linear_attention"] is LINEAR
  ours = names.flatten(MODEL, params)
  theirs = names.flatten(found.config, found.params)
  kept = [
    n
    for n in theirs
    if not n.startswith(("layers.1.mixer.", "layers.2.mixer."))
  ]
  for name in kept:
    np.testing.assert_array_equal(theirs[name], ours[name], name)
  # Also to a third kind, to another of a kind that stays, and back to one.
  third = swap.config_with(found.config, TRELLIS, [0])
  assert third.pattern == "1*trellis,2*linear_attention,1*memory"
  wide = dataclasses.replace(LINEAR, heads=4)
  fourth = swap.config_with(third, wide, [1])
  assert fourth.layer_mixers() == [TRELLIS, wide, LINEAR, GROUPED]
  assert fourth.layer_names()[1:3] == ["linear_attention_2", "linear_attention"]
  one = swap.config_with(fourth, LINEAR, range(4))
  assert (one.pattern, one.mixers) == (
    "linear_attention",
    {"linear_attention": LINEAR},
  )


@pytest.mark.parametrize(
  ("layers", "pattern"),
  [
    ([1, 3], "memory+linear_attention"),
    ([0, 2], "linear_attention+memory"),
    ([3], "3*memory,1*linear_attention"),
    ([0, 1, 2, 3], "linear_attention"),
  ],
)
def test_the_pattern_is_short(layers, pattern):
  found = swap.config_with(MODEL, LINEAR, layers)
  assert found.pattern == pattern
  mixers = [found.mixers[name] for name in found.layer_names()]
  assert [m is LINEAR for m in mixers] == [d in layers for d in range(4)]


def test_a_mixer_is_written_as_a_flag():
  found = swap.parse("trellis:num_slots=4,forget_gate=False,phi=silu", GROUPED)
  assert isinstance(found, trellis.TrellisConfig)
  assert (found.heads, found.key_dim, found.value_dim) == (2, 8, 8)
  assert (found.num_slots, found.forget_gate, found.phi) == (4, False, "silu")
  assert swap.parse("softmax_attention:heads=4", GROUPED).heads == 4
  found = swap.parse("softmax_attention", GROUPED)
  assert (found.rotary_dim, found.projection_bias) == (4, True)
  found = swap.parse("softmax_attention:projection_bias=false", GROUPED)
  assert not found.projection_bias
  # It knows no positions, whatever the old one has.
  assert swap.parse("ovq", GROUPED).rotary_dim == 0
  # What would change inherited projections is off, whatever the default.
  assert not swap.parse("key_value_means", GROUPED).token_shift
  assert swap.parse("key_value_means:token_shift=true", GROUPED).token_shift
  assert swap.parse("bounded_memory", GROUPED).convolution_width == 0
  # It may not rotate a whole key, and has a rule of its own.
  whole = dataclasses.replace(GROUPED, rotary_dim=8)
  assert swap.parse("key_value_means", whole).rotary_dim is None
  assert swap.parse("key_value_means", GROUPED).rotary_dim == 4
  found = swap.parse("key_value_means:key_dim=16", whole)
  assert (found.key_dim, found.rotary_dim) == (16, 8)
  uneven = dataclasses.replace(GROUPED, value_dim=4)
  found = swap.parse("test_time_training:value_dim=8", uneven)
  assert found.rotary_dim == GROUPED.rotary_dim
  assert swap.parse("rwkv7", GROUPED).value_residual == "none"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("telis", "'telis' is no mixer; there are: trellis"),
    ("trellis:slots=4", "no field 'slots'; it has heads"),
    ("trellis:num_slots=many", "num_slots takes a whole number, not 'many'"),
    ("trellis:num_slots=0", "num_slots=0 must be at least 1"),
    ("trellis:num_slots=1.5", "1.5"),
    ("softmax_attention:value_residual=scalar", "leave value_residual"),
    (
      "key_value_means:rotary_dim=8",
      "rotary_dim=8 must be less than key_dim=8",
    ),
    ("key_value_means:budget=os:getcwd", "getcwd() takes no arguments"),
  ],
)
def test_mistakes_are_told(text, message):
  with pytest.raises(errors.UserError) as error:
    swap.config_with(MODEL, swap.parse(text, GROUPED), [0])
  assert message in str(error.value)


def test_layers_that_are_not_there():
  for layers in ([], [4], [0, -1]):
    with pytest.raises(errors.UserError, match="give some of 0 to 3"):
      swap.config_with(MODEL, LINEAR, layers)


def test_a_kept_layer_s_first_value_stays_its_source():
  residual = dataclasses.replace(GROUPED, value_residual="static")
  model = dataclasses.replace(
    MODEL, mixers={"a": residual, "b": LINEAR}, pattern="1*b,3*a"
  )
  for layers in ([1], [1, 3]):
    with pytest.raises(errors.UserError) as error:
      swap.config_with(model, LINEAR, layers)
    assert "layer 2 is kept and reads the value of layer 1" in str(error.value)
  for layers in ([0], [2, 3], [1, 2, 3]):
    swap.config_with(model, LINEAR, layers)
