"""The Key-Value Means paper's models, made small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcomp.models import decoder, gptalpha
from memcomp_kernels.testing import errors


def small(name):
  """The preset with its shape kept and its sizes cut."""
  config = gptalpha.language_model(name)
  config.vocab_size, config.d_model, config.mlp_dim = 40, 16, 32
  config.num_layers, config.dtype = 4, "float32"
  for mixer in config.mixers.values():
    mixer.heads, mixer.key_dim, mixer.value_dim = 2, 8, 8
  memory = config.mixers["memory"]
  memory.rotary_dim, memory.chunk_size, memory.budget_rows = 4, 4, 6
  memory.budget_scale, memory.max_length = 2.0, 64
  if window := config.mixers.get("window"):
    window.rotary_dim, window.window_size = 8, 6
  return config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvm_120m_sqrt", "kvm_350m_hybrid"])
def test_steps_equal_the_sequence_and_gradients_flow(name):
  config = small(name)
  tokens = np.random.default_rng(0).integers(0, 40, (2, 30), np.int32)

  @jax.jit
  def init():
    return nnx.split(decoder.Decoder(config, rngs=nnx.Rngs(0)))[1]

  graph = nnx.split(
    nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0)))
  )[0]
  # Away from the start, where every block is the identity.
  params = jax.tree.map(lambda x: x + 0.02, init())

  @jax.jit
  def sequence(params):
    model = nnx.merge(graph, params)
    return model(tokens)

  @jax.jit
  def steps(params):
    model = nnx.merge(graph, params)

    def step(state, token):
      logits, state = model.step(token, state)
      return state, logits

    _, logits = jax.lax.scan(step, model.init_state(2, 30), tokens.T)
    return jnp.moveaxis(logits, 0, 1)

  errors.assert_close(steps(params), sequence(params), 1e-5)
  gradient = jax.jit(
    jax.grad(lambda params: jnp.mean(jnp.sin(sequence(params))))
  )(params)
  errors.assert_finite(gradient)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert jnp.any(leaf != 0), jax.tree_util.keystr(path)


@pytest.mark.slow
def test_blocks_start_as_the_identity():
  config = small("kvm_120m")
  config.num_layers = 2
  model = decoder.Decoder(config, rngs=nnx.Rngs(0))
  tokens = np.arange(12, dtype=np.int32)[None]
  hidden, _ = model.hidden(tokens)
  x = model.embedding_norm(model.embedding[...][tokens])
  np.testing.assert_allclose(hidden, model.norm(x), atol=1e-6)


def test_layers_of_the_hybrid_alternate():
  config = gptalpha.language_model("kvm_120m_hybrid")
  kinds = [type(m).__name__ for m in config.layer_mixers()]
  assert kinds[:2] == ["SoftmaxAttentionConfig", "KeyValueMeansConfig"]
  assert kinds == kinds[:2] * 6
  assert config.residual_scale == 1.0
  assert gptalpha.language_model("kvm_350m").residual_scale == 0.5


def test_recipes_by_hand():
  small, large = map(gptalpha.train_recipe, ("kvm_120m", "kvm_350m_sqrt"))
  for recipe, tokens in ((small, 3.1e9), (large, 7.9e9)):
    seen = recipe.steps * recipe.batch_size * recipe.sequence_length
    assert seen == pytest.approx(tokens, rel=0.02)
  assert large.optimizer["learning_rate"] == pytest.approx(1.26491e-3, rel=1e-5)
  assert large.optimizer["weight_decay"] == pytest.approx(0.126491, rel=1e-5)
