"""Small models of every mixer, for `test_decoder`."""

import dataclasses

import numpy as np
from flax import nnx

from memcomp.layers import (
  delta_net,
  infini_attention,
  key_value_means,
  lattice,
  linear_attention,
  mamba2,
  ovq,
  rwkv7,
  slot_attention,
  softmax_attention,
  tensor_cache,
  test_time_training,
  trellis,
  two_pass_delta,
)
from memcomp.models import decoder

MIXERS = {
  "trellis": trellis.TrellisConfig(
    heads=2, key_dim=8, value_dim=12, num_slots=6, chunk_size=8
  ),
  "lattice": lattice.LatticeConfig(
    heads=2, value_dim=12, num_slots=6, chunk_size=8
  ),
  "delta_net": delta_net.DeltaNetConfig(heads=2, key_dim=8, value_dim=12),
  "gated_delta_net": delta_net.GatedDeltaNetConfig(
    heads=2, key_dim=8, value_dim=12
  ),
  "infini_attention": infini_attention.InfiniAttentionConfig(
    heads=2, key_dim=8, value_dim=12, rotary_dim=4, segment_size=8
  ),
  "mamba2": mamba2.Mamba2Config(heads=4, key_dim=8, value_dim=6, groups=2),
  "linear_attention": linear_attention.LinearAttentionConfig(
    heads=2, key_dim=8, value_dim=12, decay="token"
  ),
  "key_value_means": key_value_means.KeyValueMeansConfig(
    heads=2,
    key_dim=8,
    value_dim=12,
    rotary_dim=4,
    chunk_size=4,
    budget="power",
    budget_rows=4,
    budget_scale=1.5,
    max_length=64,
  ),
  "slot_attention": slot_attention.SlotAttentionConfig(
    heads=2, key_dim=8, value_dim=12, num_slots=6
  ),
  "bounded_memory": slot_attention.BoundedMemoryConfig(
    heads=2, key_dim=8, value_dim=12, num_slots=6, rotary_dim=4
  ),
  "softmax_attention": softmax_attention.SoftmaxAttentionConfig(
    heads=2, key_dim=8, value_dim=12, rotary_dim=4, max_length=32
  ),
  "tensor_cache": tensor_cache.TensorCacheConfig(
    heads=2,
    key_dim=8,
    value_dim=12,
    rotary_dim=4,
    window_size=5,
    chunk_size=4,
    rule="delta",
    unit_keys=True,  # without, a delta rule of this rate diverges
    write_rate_init=0.5,
  ),
  "ovq": ovq.OVQConfig(
    heads=2,
    key_dim=8,
    value_dim=12,
    chunk_size=4,
    max_rows=6,
    token_shift=True,
    value_residual="dynamic",
  ),
  "rwkv7": rwkv7.RWKV7Config(heads=2, key_dim=8, value_dim=12),
  "two_pass_delta": two_pass_delta.TwoPassDeltaConfig(
    heads=2, key_dim=8, value_dim=12, write_every=2
  ),
  "test_time_training": test_time_training.TestTimeTrainingConfig(
    heads=2, key_dim=8, value_dim=8, rotary_dim=4, chunk_size=8
  ),
}

FOUR = ("trellis", "lattice", "key_value_means", "tensor_cache")
OFTEN = (*FOUR, "hybrid")
# And one whose chunk form the other linear memories share, and attention. What
# is a layer's own, such as positions in a segment, its own tests look at.
KINDS = (*OFTEN, "gated_delta_net", "softmax_attention")

# Every option of the block, two kinds of layer, values handed up.
HYBRID = {
  "mixers": {
    "memory": MIXERS["linear_attention"],
    "window": softmax_attention.SoftmaxAttentionConfig(
      heads=2,
      key_dim=8,
      value_dim=8,
      rotary_dim=4,
      window_size=6,
      sink_tokens=1,
      normalize_key="layer",
      token_shift=True,
      value_residual="dynamic",
    ),
  },
  "num_layers": 5,
  "pattern": "window+memory,1*window",
  "channel_mixer": "relu2_shift",
  "norm": "layer",
  "residual_scale": 0.5,
  "embedding_norm": True,
  "tied_embeddings": False,
}


def config(name="trellis", mixer=None, **changes):
  return decoder.DecoderConfig(
    **{
      "vocab_size": 50,
      "d_model": 16,
      "num_layers": 2,
      "mlp_dim": 24,
      "mixers": {"memory": dataclasses.replace(MIXERS[name], **(mixer or {}))},
      "embedding_convolution": 4,
      "init_std": 0.2,
      "embedding_std": 0.5,
    }
    | changes
  )


TIME = 21


def build(config, seed=0):
  """Not compiled as one: models share the programs that draw an array."""
  config.validate()
  return decoder.Decoder(config, rngs=nnx.Rngs(seed))


def tokens(batch, time, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 50, (batch, time), dtype=np.int32)
