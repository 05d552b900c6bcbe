"""Mixers are taught layer by layer, each by its own."""

import jax
import numpy as np
import pytest
import runs

from memcomp import config as config_lib
from memcomp.convert import distill, swap
from memcomp.data import batch as batch_lib
from memcomp.layers import base, linear_attention, softmax_attention
from memcomp.models import abstract, decoder
from memcomp.models import stacks as stacks_lib

SIZES = {"heads": 2, "key_dim": 8, "value_dim": 8}
LINEAR = linear_attention.LinearAttentionConfig(**SIZES)
TEACHER = decoder.DecoderConfig(
  vocab_size=24,
  d_model=16,
  num_layers=6,
  mlp_dim=8,
  mixers={
    "memory": softmax_attention.SoftmaxAttentionConfig(**SIZES, rotary_dim=4)
  },
)
SETTINGS = config_lib.OptimizerConfig(
  learning_rate=1e-2, warmup_steps=0, weight_decay=0.0
)
# The new mixers lie in two stacks, layers 0 and 3 and layers 1 and 4.
LAYERS = [0, 1, 3, 4]


def batch_of(tokens, segment_ids=None):
  return batch_lib.Batch(tokens, tokens, segment_ids, None)


def module_of(config, params):
  return abstract.merge(abstract.model_of(config).graphdef, params)


@pytest.fixture(scope="module")
def batch():
  rng = np.random.default_rng(0)
  ids = np.repeat([[1] * 7 + [2] * 6 + [0] * 3], 2, axis=0)
  return batch_of(
    rng.integers(0, 24, (2, 16)).astype(np.int32), ids.astype(np.int32)
  )


@pytest.fixture(scope="module")
def teacher():
  return runs.random_params(config_lib.Config(name="old", model=TEACHER))


@pytest.fixture(scope="module")
def student(teacher):
  changed = swap.config_with(TEACHER, LINEAR, LAYERS)
  assert changed.pattern == "2*linear_attention+memory"
  fresh = runs.random_params(config_lib.Config(name="new", model=changed))
  return swap.swap(TEACHER, teacher, LINEAR, layers=LAYERS, fresh=fresh)


@pytest.fixture(scope="module")
def taught(teacher, student, batch):
  """The errors of 40 steps, and the parameters after them."""
  made = distill.make(TEACHER, student.config, LAYERS, SETTINGS, 40)
  trained, opt_state = made.start(student.params)
  found = []
  for _ in range(40):
    trained, opt_state, errors = made.step(
      trained, opt_state, student.params, teacher, batch
    )
    found.append(np.asarray(errors))
  return np.stack(found), distill.replaced(student.params, trained)


@pytest.mark.slow
def test_what_mixers_see_is_what_blocks_see(student, batch):
  """Block by block, beside the scans over three stacks of layers."""
  model = module_of(student.config, student.params)
  given, mixed = jax.jit(model.mixer_io)(batch.tokens, batch.segment_ids)
  assert given.shape == mixed.shape == (6, 2, 16, 16)

  @jax.jit
  def one_by_one(tokens, ids):
    state = model.init_state(2, 16)
    x, _ = model.embed(tokens, state)
    call = base.Call(segment_ids=ids, max_position=0)
    found = []
    for depth in range(6):
      block, own = model.layer(depth, state)
      seen = block.mixer_norm(x)
      y, _ = block.mixer(seen, own.mixer, segment_ids=ids, max_position=0)
      found.append((seen, y))
      x, _ = block(x, own, call, state.segment_id)
    return found

  expected = one_by_one(batch.tokens, batch.segment_ids)
  for depth, (seen, y) in enumerate(expected):
    np.testing.assert_allclose(given[depth], seen, atol=2e-5)
    np.testing.assert_allclose(mixed[depth], y, atol=2e-5)


@pytest.mark.slow
def test_errors_are_of_their_layers(teacher, student, taught, batch):
  """The first errors, against each new mixer called by itself."""
  old = module_of(TEACHER, teacher)
  new = module_of(student.config, student.params)
  given, wanted = jax.jit(old.mixer_io)(batch.tokens, batch.segment_ids)
  real = batch.segment_ids != 0

  @jax.jit
  def outputs(given, ids):
    state = new.init_state(2, 16)
    found = []
    for depth in LAYERS:
      block, own = new.layer(depth, state)
      y, _ = block.mixer(
        given[depth], own.mixer, segment_ids=ids, max_position=0
      )
      found.append(y)
    return found

  found = outputs(given, batch.segment_ids)
  for place, (depth, y) in enumerate(zip(LAYERS, found, strict=True)):
    square = np.sum(np.square(wanted[depth])[real])
    expected = np.sum(np.square(y - wanted[depth])[real]) / square
    np.testing.assert_allclose(taught[0][0, place], expected, rtol=1e-4)


@pytest.mark.slow
def test_errors_fall_in_every_layer(taught):
  errors, _ = taught
  assert (errors[-1] < 0.7 * errors[0]).all(), (errors[0], errors[-1])
  assert (errors[-1] < 0.9).all()


def test_nothing_but_the_new_mixers_is_trained(student, taught):
  _, after = taught
  trained = {
    str(i)
    for i, stack in enumerate(stacks_lib.stacks_of(student.config))
    if stack.first in LAYERS
  }
  for path, old in jax.tree_util.tree_leaves_with_path(student.params):
    keys = [str(key.key) for key in path]
    new = after
    for key in path:
      new = new[key.key]
    moved = bool((np.asarray(new) != np.asarray(old)).any())
    assert moved == (keys[2:3] == ["mixer"] and keys[1] in trained), keys


def test_padding_does_not_count():
  """Some mixers give a constant there, which is nobody's to learn."""
  wanted = np.full((1, 4, 2), 2.0, np.float32)
  y = wanted + np.array([1, 0, 0, 50], np.float32)[:, None]
  ids = np.array([[1, 1, 2, 0]])
  found = distill.relative_error(y, wanted, ids)
  np.testing.assert_allclose(found, 2 / 24, rtol=1e-6)
  found = distill.relative_error(y[:, :3], wanted[:, :3], None)
  np.testing.assert_allclose(found, 2 / 24, rtol=1e-6)
