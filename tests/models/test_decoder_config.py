"""A model's mixers by name: what may be a name, and what errors name."""

import dataclasses

import pytest
from flax import nnx

from memcomp.layers import linear_attention, softmax_attention, trellis
from memcomp.models import decoder, decoder_config, overview

SIZES = {"heads": 2, "key_dim": 8, "value_dim": 8}
TRELLIS = trellis.TrellisConfig(**SIZES)
WINDOW = softmax_attention.SoftmaxAttentionConfig(**SIZES, window_size=8)
LINEAR = linear_attention.LinearAttentionConfig(**SIZES)


def config(mixers, **fields):
  return decoder_config.DecoderConfig(
    d_model=16, num_layers=4, mixers=mixers, **fields
  )


@pytest.mark.parametrize(
  "name", ["values", "get", "for", "None", "x-y", "3x", "", "é", 3]
)
def test_a_name_that_no_flag_reaches_is_refused(name):
  with pytest.raises(ValueError, match=r"mixers: .* cannot be set by a flag"):
    config({name: TRELLIS})
  changed = config({"memory": TRELLIS})
  changed.mixers[name] = WINDOW
  with pytest.raises(ValueError, match=r"mixers: .* cannot be set by a flag"):
    changed.validate()


@pytest.mark.parametrize(
  ("mixers", "message"),
  [
    ({}, r"mixers=\{\}; give one or more by name"),
    (TRELLIS, r"mixers=TrellisConfig\(.*; give one or more by name"),
    ({"memory": None}, "mixers.memory=None is no mixer's configuration"),
  ],
)
def test_what_is_no_dict_of_mixers_is_refused(mixers, message):
  with pytest.raises(ValueError, match=message) as error:
    config(mixers)
  assert "\n" not in str(error.value)


def test_a_mixer_out_of_range_is_named():
  wrong = dataclasses.replace(WINDOW, window_size=-1)
  found = config({"memory": TRELLIS, "near": wrong}, pattern="memory+near")
  with pytest.raises(ValueError, match=r"^mixers\.near: window_size=-1"):
    found.validate()
  odd = dataclasses.replace(TRELLIS, heads=3, key_dim=0)
  with pytest.raises(ValueError, match=r"^mixers\.memory: heads=3 does not"):
    config({"memory": odd}).validate()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"num_layers": 1.0}, "num_layers=1.0 is float, not an integer"),
    ({"d_model": None}, "d_model=None is NoneType, not an integer"),
    ({"norm_eps": "1e-6"}, "norm_eps='1e-6' is str, not a number"),
    ({"tied_embeddings": "no"}, "tied_embeddings='no' is str, not True"),
    ({"pattern": 5}, "pattern=5 is int, not text"),
    ({"head_std": -1.0}, "head_std=-1.0 must not be negative"),
    ({"embedding_convolution": 1}, "embedding_convolution=1 must be 0 or"),
    ({"remat": "all"}, "remat='all' is not one of: none, block"),
  ],
)
def test_a_field_of_a_wrong_type_or_out_of_range_is_named(fields, message):
  wrong = dataclasses.replace(config({"memory": TRELLIS}), **fields)
  with pytest.raises(ValueError, match=message):
    decoder.Decoder(wrong, rngs=nnx.Rngs(0))


def test_one_mixer_needs_no_pattern_and_several_do():
  assert config({"x": WINDOW}).layer_names() == ["x"] * 4
  several = config({"memory": TRELLIS, "window": WINDOW})
  with pytest.raises(ValueError, match=r"pattern=''.*memory, window"):
    several.validate()


def test_a_model_in_a_line():
  assert overview.mixer_names(config({"memory": LINEAR})) == "linear_attention"
  several = config(
    {"memory": LINEAR, "near": WINDOW, "unused": TRELLIS},
    pattern="near+memory",
  )
  assert overview.mixer_names(several) == (
    "memory linear_attention + near softmax_attention (near+memory)"
  )
