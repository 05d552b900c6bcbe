"""Models in a program of your own: what a reader of the docs would type."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memcomp.layers.linear_attention import LinearAttentionConfig
from memcomp.layers.softmax_attention import SoftmaxAttentionConfig
from memcomp.layers.trellis import TrellisConfig
from memcomp.models.decoder import Decoder, DecoderConfig

HEADS = {"heads": 2, "key_dim": 8, "value_dim": 8}
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24))

call = nnx.jit(lambda model, tokens, **more: model(tokens, **more))


def test_a_hybrid_in_a_few_lines():
  tokens = TOKENS
  # quoted: hybrid model
  from memcomp.layers import SoftmaxAttentionConfig, TrellisConfig
  from memcomp.models import Decoder, DecoderConfig

  config = DecoderConfig(
    d_model=128,
    num_layers=4,
    mlp_dim=256,
    mixers={
      "memory": TrellisConfig(),
      "window": SoftmaxAttentionConfig(window_size=64),
    },
    pattern="memory*3,window",
  )
  model = Decoder(config, rngs=nnx.Rngs(0))
  logits = model(tokens)  # [batch, time, vocab_size], float32
  # end
  assert logits.shape == (2, 24, 256) and logits.dtype == jnp.float32
  assert np.isfinite(logits).all()


@pytest.fixture(scope="module")
def model():
  memory = TrellisConfig(**HEADS, num_slots=8, chunk_size=8)
  window = SoftmaxAttentionConfig(**HEADS, rotary_dim=8, window_size=8)
  config = DecoderConfig(
    d_model=16,
    num_layers=4,
    mlp_dim=32,
    mixers={"memory": memory, "window": window},
    pattern="memory*3,window",
  )
  return Decoder(config, rngs=nnx.Rngs(0))


def test_reading_on_from_a_state(model):
  state = model.init_state(batch=2)
  first, state = call(model, TOKENS[:, :12], state=state)
  rest, state = call(model, TOKENS[:, 12:], state=state)
  together = jnp.concatenate([first, rest], axis=1)
  np.testing.assert_allclose(together, call(model, TOKENS), atol=1e-5)
  step = nnx.jit(lambda model, tokens, state: model.step(tokens, state))
  next_logits, state = step(model, jnp.array([1, 2]), state)
  assert next_logits.shape == (2, 256)


def test_documents_that_share_a_row(model):
  segment_ids = np.array([[1] * 12 + [2] * 12] * 2)
  packed = call(model, TOKENS, segment_ids=segment_ids)
  alone = call(model, TOKENS[:, 12:])
  np.testing.assert_allclose(packed[:, 12:], alone, atol=1e-5)


def test_training():
  mixer = LinearAttentionConfig(**HEADS)
  config = DecoderConfig(
    d_model=16, num_layers=2, mlp_dim=32, mixers={"memory": mixer}
  )
  model = Decoder(config, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

  @nnx.jit
  def train_step(model, optimizer, tokens):
    def loss_of(model):
      logits = model(tokens[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
      ).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss

  losses = [train_step(model, optimizer, TOKENS) for _ in range(20)]
  assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_as_many_kinds_of_mixers_as_wanted():
  config = DecoderConfig(
    d_model=16,
    num_layers=6,
    mlp_dim=32,
    mixers={
      "local": SoftmaxAttentionConfig(**HEADS, rotary_dim=8, window_size=4),
      "whole": SoftmaxAttentionConfig(**HEADS, rotary_dim=8),
      "sum": LinearAttentionConfig(**HEADS),
      "decay": LinearAttentionConfig(**HEADS),
    },
    pattern="local,2*(sum+decay),whole",
  )
  config.mixers["decay"].decay = "token"
  names = ["local", "sum", "decay", "sum", "decay", "whole"]
  assert config.layer_names() == names
  model = Decoder(config, rngs=nnx.Rngs(0))
  assert call(model, TOKENS).shape == (2, 24, 256)


def test_a_layer_in_a_model_of_your_own():
  # quoted: a model of your own
  from flax import nnx

  from memcomp.layers import GatedDeltaNet

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.embed = nnx.Embed(256, 32, rngs=rngs)
      self.norm = nnx.LayerNorm(32, rngs=rngs)
      self.mixer = GatedDeltaNet(32, heads=2, rngs=rngs)
      self.head = nnx.Linear(32, 256, rngs=rngs)

    def __call__(self, tokens):  # [batch, time] to [batch, time, 256]
      x = self.embed(tokens)
      x = x + self.mixer(self.norm(x))
      return self.head(x)

    def step(self, token, state):  # [batch] to [batch, 256]
      x = self.embed(token)
      y, state = self.mixer.step(self.norm(x), state)
      return self.head(x + y), state

  # end

  # quoted: training it
  import jax.numpy as jnp
  import optax

  text = "to be or not to be, that is the question. " * 4
  tokens = jnp.array([list(text.encode())])  # [1, time]

  model = Model(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

  @nnx.jit
  def train_step(model, optimizer, tokens):
    def loss_of(model):
      return optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
      ).mean()

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return loss

  losses = [train_step(model, optimizer, tokens) for _ in range(60)]
  # end

  # quoted: decoding
  @nnx.jit
  def next_byte(model, token, state):
    logits, state = model.step(token, state)
    return logits.argmax(-1), state

  state = model.mixer.init_state(batch=1)
  for byte in b"to be or ":
    token, state = next_byte(model, jnp.array([byte]), state)
  answer = []
  for _ in range(9):
    answer.append(int(token[0]))
    token, state = next_byte(model, token, state)
  print(bytes(answer))
  # end
  assert losses[0] > 5 and losses[-1] < 1
  assert bytes(answer) == b"not to be"
  state = model.mixer.init_state(batch=1)
  logits, _ = nnx.jit(lambda m, t, s: m.step(t, s))(model, tokens[:, 0], state)
  np.testing.assert_allclose(logits, call(model, tokens)[:, 0], atol=1e-4)
