"""Rows that begin from the state that other text left behind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rotation
import training_cases
from flax import nnx

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.data import batch as batch_lib
from memcomp.data import sources
from memcomp.layers import registry
from memcomp.models import abstract, decoder
from memcomp.training import loss, passing, state, validate, validation
from memcomp_kernels.testing import errors as kernel_errors
from memcomp_kernels.testing import tolerances

ROWS, TIME = 4, 16


def _batch(seed, *, packed=False):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(1, 250, (ROWS, TIME + 1)).astype(np.int32)
  targets = tokens[:, 1:].copy()
  ids = None
  if packed:
    ids = np.repeat([[1, 2, 0]], ROWS, 0).repeat([6, 7, 3], 1)
    ids[1] = np.repeat([0, 3, 1], [2, 5, 9])
    ids[3] = 1
    targets[ids == 0] = -1
  return batch_lib.Batch(tokens[:, :-1], targets, ids, None)


def _setup(share=0.5, **training):
  config = training_cases.tiny(state_passing=share, **training)
  config.optimizer.learning_rate = 1e-2
  config.optimizer.final_learning_rate = 1e-2
  config.optimizer.warmup_steps = 0
  return config, sharding.make_mesh(config.mesh)


def _run(config, mesh, batches, start=None):
  current, losses = start or state.initial_state(config, mesh), []
  train_step = training_cases.train_step(config)
  with jax.set_mesh(mesh):
    for batch in batches:
      batch = jax.device_put(batch, sharding.batch_sharding(mesh))
      current, metrics = train_step(current, batch)
      losses.append(float(metrics["loss"]))
  return current, losses


def _by_hand(config, mesh, batches):
  """Row by row: each from its own state before, or from a fresh one."""
  model = abstract.model_of(config.model)
  tx = state.make_optimizer(config, model)
  params = state.initial_state(config, mesh).params
  opt_state = tx.init(params)
  left = [None] * ROWS
  losses, passed_rows = [], 0

  def row_loss(params, batch, before, first):
    module = abstract.merge(model.graphdef, params)
    if before is None:
      before = module.init_state(1)
    ids = batch.segment_ids
    if first is not None:
      # The first document of the row goes on where the row before ended.
      before = before.of_segment(first)
    hidden, after = module.hidden(batch.tokens, state=before, segment_ids=ids)
    return loss.next_token_loss(module.logits, hidden, batch.targets).nll, after

  gradient = jax.jit(jax.value_and_grad(row_loss, has_aux=True))
  for number, batch in enumerate(batches):
    passed = passing.drawn(config, jnp.int32(number))
    passed_rows += int(passed.sum()) * (number > 0)
    tokens = (batch.targets >= 0).sum()
    total, summed = 0.0, jax.tree.map(jnp.zeros_like, params)
    for row in range(ROWS):
      own = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
      before = left[row] if passed[row] else None
      first = None
      if own.segment_ids is not None:
        first = own.segment_ids[own.segment_ids != 0][:1]
      (nll, left[row]), d = gradient(params, own, before, first)
      total += float(nll)
      summed = jax.tree.map(jnp.add, summed, d)
    grads = jax.tree.map(lambda d, n=tokens: d / n, summed)
    losses.append(total / tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
  assert passed_rows > 1
  return params, losses


@pytest.mark.usefixtures("leaky_model")
@pytest.mark.parametrize(
  ("packed", "parts"),
  rotation.cases([(False, 1), (True, 1), (False, 2), (True, 2)], [(True, 2)]),
)
def test_losses_and_parameters_of_a_loop_by_hand(packed, parts):
  config, mesh = _setup(accumulation=parts)
  batches = [_batch(i, packed=packed) for i in range(4)]
  after, losses = _run(config, mesh, batches)
  params, expected = _by_hand(config, mesh, batches)
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  # Among them the learned initial memory, to which fresh rows alone give.
  kernel_errors.assert_close(after.params, params, tolerances.SHARDED, "params")


@pytest.mark.slow
@pytest.mark.usefixtures("leaky_model")
@pytest.mark.parametrize("sizes", [{"replica": 2}, {"fsdp": 4}])
def test_a_mesh_draws_and_passes_the_same(sizes):
  config, mesh = _setup(accumulation=4 // np.prod(list(sizes.values())))
  batches = [_batch(i) for i in range(4)]
  _, expected = _run(config, mesh, batches)
  config.mesh = config_lib.MeshConfig(**sizes)
  _, losses = _run(config, sharding.make_mesh(config.mesh), batches)
  np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow  # Compiles Trellis three times.
def test_time_over_shards_passes_the_same():
  config, mesh = _setup()
  config.model.mixers["memory"].chunk_size = 5
  batches = [_batch(i, packed=True) for i in range(3)]
  _, expected = _run(config, mesh, batches)
  assert expected == pytest.approx(_by_hand(config, mesh, batches)[1], rel=1e-5)
  config.mesh = config_lib.MeshConfig(context=2, fsdp=2)
  _, losses = _run(config, sharding.make_mesh(config.mesh), batches)
  np.testing.assert_allclose(losses, expected, rtol=1e-5)


SMALL = {
  "trellis": {"num_slots": 4, "chunk_size": 6},
  "lattice": {"num_slots": 4, "chunk_size": 6},
  # Fewer rows than tokens pass: the bound of a memory that grows.
  "key_value_means": {
    "rotary_dim": 4,
    "chunk_size": 6,
    "budget": "power",
    "budget_rows": 6,
    "max_length": 24,
  },
  "tensor_cache": {"rotary_dim": 4, "window_size": 6, "chunk_size": 6},
  "ovq": {"chunk_size": 6, "max_rows": 8},
  "slot_attention": {"num_slots": 4},
  "bounded_memory": {"num_slots": 4, "rotary_dim": 4},
  "infini_attention": {"rotary_dim": 4, "segment_size": 6},
  "softmax_attention": {"rotary_dim": 4, "max_length": 48},
  "test_time_training": {"rotary_dim": 4, "chunk_size": 6},
}


@pytest.mark.parametrize(
  ("name", "packed"),
  rotation.cases(
    [(name, packed) for name in registry.MIXERS for packed in (False, True)],
    [("linear_attention", True)],
  ),
)
def test_every_mixer_reads_on_as_in_one_long_text(name, packed):
  # Rows of 16 tokens and chunks of 6: a state is handed on within a chunk.
  sizes = {"heads": 2, "key_dim": 8, "value_dim": 8}
  config, mesh = _setup()
  config.model = decoder.DecoderConfig(
    vocab_size=256,
    d_model=16,
    num_layers=2,
    mlp_dim=16,
    mixers={"memory": registry.config_of(name)(**sizes, **SMALL.get(name, {}))},
    embedding_convolution=3,
    channel_mixer="relu2_shift" if name == "rwkv7" else "swiglu",
    embedding_std=0.5,
    init_std=0.2,
  )
  model = abstract.model_of(config.model)
  axes = state.row_axes(config, model)
  params = state.initial_state(config, mesh).params

  @jax.jit
  def window(batch, carry, passed):
    module = abstract.merge(model.graphdef, params)
    before = passing.begin(config, module, batch, carry, axes, passed)
    hidden, after = module.hidden(
      batch.tokens, state=before, segment_ids=batch.segment_ids
    )
    return module.logits(hidden), after

  # Row 0 never passes, row 1 once, row 2 twice, row 3 in the first step only.
  masks = np.array([[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 1, 0]], bool)
  carry = abstract.merge(model.graphdef, params).init_state(ROWS)
  texts = [(np.zeros(0, int), np.zeros(0, int))] * ROWS
  for number, passed in enumerate(masks):
    batch = _batch(number, packed=packed)
    logits, carry = window(batch, carry, passed)
    ids = np.ones((ROWS, TIME), int)
    ids = ids if batch.segment_ids is None else batch.segment_ids
    for row in range(ROWS):
      own = np.where(ids[row], 10 * number + ids[row], 0)
      before = texts[row] if passed[row] else ([], [])
      seen = np.asarray(before[1], int)
      if seen.any():  # Its first document is the last one of what was read.
        own[own == own[own != 0][0]] = seen[seen != 0][-1]
      texts[row] = [
        np.concatenate([a, b]).astype(np.int32)
        for a, b in zip(before, (batch.tokens[row], own), strict=True)
      ]
  longest = max(len(tokens) for tokens, _ in texts)
  assert longest == 3 * TIME
  whole = np.zeros((2, ROWS, longest), np.int32)
  for row, text in enumerate(texts):
    whole[:, row, : len(text[0])] = text

  @jax.jit
  def at_once(tokens, ids):
    module = abstract.merge(model.graphdef, params)
    hidden, _ = module.hidden(
      tokens, state=module.init_state(ROWS), segment_ids=ids
    )
    return module.logits(hidden)

  expected = at_once(*whole)
  for row, (tokens, ids) in enumerate(texts):
    last = slice(len(tokens) - TIME, len(tokens))
    real = ids[last] != 0
    kernel_errors.assert_close(
      logits[row][real], expected[row, last][real], tolerances.SHARDED, name
    )


@pytest.mark.usefixtures("leaky_model")
def test_a_state_that_has_read_nothing_stays_fresh():
  """As in the first step. A token shift then sees that nothing came before."""
  config, _ = _setup()
  module = decoder.Decoder(config.model, rngs=nnx.Rngs(0))
  carry = module.init_state(ROWS)._replace(segment_id=jnp.array([0, 5, 0, 5]))
  axes = state.row_axes(config, abstract.model_of(config.model))
  for packed, expected in ((False, [0, 1, 0, 1]), (True, [0, 3, 0, 1])):
    start = passing.begin(
      config,
      module,
      _batch(0, packed=packed),
      carry,
      axes,
      jnp.ones(ROWS, bool),
    )
    np.testing.assert_array_equal(start.segment_id, expected)


def test_rows_are_drawn_from_seed_and_step_alone():
  config, _ = _setup(share=0.2, batch_size=64)
  draws = [np.array(passing.drawn(config, jnp.int32(i))) for i in range(200)]
  assert abs(np.mean(draws) - 0.2) < 0.02
  # Neither a step's rows nor a row's steps are all alike.
  assert 0 < np.std(np.mean(draws, axis=1)) < 0.1
  again = passing.drawn(config, jnp.int32(7))
  np.testing.assert_array_equal(again, draws[7])
  config.seed = 1
  assert (np.array(passing.drawn(config, jnp.int32(7))) != draws[7]).any()
  config.training.state_passing = 0.0
  assert passing.drawn(config, jnp.int32(7)) is None


@pytest.mark.slow
@pytest.mark.usefixtures("leaky_model")
def test_no_row_or_every_row_may_pass():
  batches = [_batch(i) for i in range(3)]
  fresh = _run(*_setup(share=0.0), batches)
  assert fresh[0].carry is None
  every = _run(*_setup(share=1.0), batches)
  config, mesh = _setup(share=0.0, carry_state=True)
  continued = _run(config, mesh, batches)
  np.testing.assert_allclose(every[1], continued[1], rtol=1e-6)
  assert every[1][0] == pytest.approx(fresh[1][0], rel=1e-6)
  assert abs(every[1][2] - fresh[1][2]) > 1e-6


@pytest.mark.usefixtures("leaky_model")
def test_rows_that_continue_and_rows_that_take_over_mix():
  """With `carry_state` a new document takes the state over if it is drawn."""
  config, mesh = _setup(carry_state=True)
  same, new = _batch(1, packed=True), _batch(1, packed=True)
  new.segment_ids[:] += 10 * (new.segment_ids != 0)
  first = _batch(0, packed=True)
  first.segment_ids[:] = 1
  same.segment_ids[1] = np.where(same.segment_ids[1] == 3, 1, 2)
  passed = np.array(passing.drawn(config, jnp.int32(1)))
  assert passed.any() and not passed.all()
  after, _ = _run(config, mesh, [first])
  losses = []
  for batch in (same, new):
    rows = []
    for row in range(ROWS):  # One row scored, so that the loss is its own.
      targets = np.where(np.arange(ROWS)[:, None] == row, batch.targets, -1)
      one = batch._replace(targets=targets)
      rows += _run(config, mesh, [one], after)[1]
    losses.append(rows)
  kept = np.isclose(*losses, rtol=1e-6)
  np.testing.assert_array_equal(kept, passed)


@pytest.mark.usefixtures("leaky_model")
def test_validation_stays_on_fresh_states(text):
  found = []
  for share in (0.0, 0.5):
    config, mesh = _setup(share)
    config.data.source = text
    store = sources.open_split(config.data, "validation")
    with jax.set_mesh(mesh):
      params = state.initial_state(config, mesh).params
      found.append(validation.make(config, store, mesh)(params))
  assert found[0] == found[1]


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_out_of_range_is_named(share):
  config, _ = _setup(share)
  with pytest.raises(errors.UserError, match=r"state_passing = .*\[0, 1\]"):
    validate.check(config)
