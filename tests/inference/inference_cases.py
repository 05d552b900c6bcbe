"""Small models with random weights, of every mixer."""

import dataclasses

import jax
import numpy as np

from memcomp import sharding
from memcomp.inference import generate, prefill, sample
from memcomp.inference import session as session_lib
from memcomp.layers import registry, trellis
from memcomp.models import abstract, decoder

GREEDY = sample.Settings(temperature=0.0)

_SMALL = {
  "heads": 8,  # one for each of eight devices
  "key_dim": 8,
  "value_dim": 8,
  "num_slots": 6,
  "chunk_size": 4,
  "rotary_dim": 4,
  "segment_size": 8,
  "budget": "power",
  "budget_rows": 4,
  "budget_scale": 1.5,
  "max_rows": 6,
}
_OWN = {
  "key_value_means": {"chunk_size": 2},
  "ovq": {"rotary_dim": 0},
  "softmax_attention": {"chunk_size": 0},
  "tensor_cache": {"window_size": 5},
}


def mixer(name, **fields):
  config = registry.config_of(name)
  names = {field.name for field in dataclasses.fields(config)}
  fields = _SMALL | _OWN.get(name, {}) | fields
  return config(**{k: v for k, v in fields.items() if k in names})


def config(names, **fields) -> decoder.DecoderConfig:
  """Of one mixer, or of several joined by "+", a layer each."""
  names = names.split("+")
  return decoder.DecoderConfig(
    vocab_size=64,
    d_model=16,
    num_layers=len(names),
    mlp_dim=24,
    embedding_convolution=4,
    mixers={f"{n}_{i}": mixer(n, **fields) for i, n in enumerate(names)},
    pattern="+".join(f"{name}_{i}" for i, name in enumerate(names)),
  )


def small_config() -> decoder.DecoderConfig:
  """Of bytes."""
  return decoder.DecoderConfig(
    d_model=32,
    num_layers=2,
    mlp_dim=48,
    embedding_convolution=4,
    mixers={
      "memory": trellis.TrellisConfig(
        heads=2, key_dim=8, value_dim=8, num_slots=8, chunk_size=8
      )
    },
  )


def build(config, mesh=None, seed=0) -> decoder.Decoder:
  """Weights from numpy: XLA takes long to compile JAX's generator."""
  rng = np.random.default_rng(seed)
  mesh = mesh or sharding.one_device()
  found = abstract.model_of(config)
  params = jax.tree.map(
    lambda x: jax.device_put(
      (0.3 * rng.standard_normal(x.shape)).astype(x.dtype), x.sharding
    ),
    abstract.params_of(found, mesh),
  )
  return abstract.merge(found.graphdef, params)


def read(model, prompts, size=16):
  session = session_lib.start(model, len(prompts))
  return prefill.read(model, session, prompts, piece_tokens=size)


def pieces(model, session, tokens=30, settings=GREEDY, **more):
  return list(
    generate.generate(model, session, tokens=tokens, settings=settings, **more)
  )


def joined(pieces):
  """The ids of each row."""
  return [
    np.concatenate(ids).tolist()
    for ids in zip(*[piece.ids for piece in pieces], strict=True)
  ]
