import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
import training_cases

from memcomp import sharding
from memcomp.data import batch as batch_lib
from memcomp.models import abstract
from memcomp.training import loss, state, step


def _batch(seed, rows=4, time=16, *, documents=False):
  """Random tokens; with documents, rows of uneven numbers of scored ones."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(1, 250, (rows, time + 1)).astype(np.int32)
  targets = tokens[:, 1:].copy()
  segments = np.ones((rows, time), np.int32)
  positions = np.tile(np.arange(time, dtype=np.int32), (rows, 1))
  if documents:
    for row in range(rows):
      end = 3 + 4 * row
      targets[row, end - 1] = -1
      segments[row, end:] = 2 if row % 2 else 0
      positions[row, end:] -= end
      if row % 2 == 0:
        targets[row, end:] = -1
  return batch_lib.Batch(tokens[:, :-1], targets, segments, positions)


pytestmark = pytest.mark.usefixtures("leaky_model")


def _setup(**training):
  config = training_cases.tiny(**training)
  config.optimizer.b1 = 0.0  # The first moment is the clipped gradient.
  if config.training.carry_state:
    config.data.packing = "stream"
  mesh = sharding.make_mesh(config.mesh)
  return config, mesh, state.initial_state(config, mesh)


def _run(config, mesh, start, batches):
  train_step = training_cases.train_step(config)
  losses, current = [], start
  with jax.set_mesh(mesh):
    for batch in batches:
      current, metrics = train_step(current, batch)
      losses.append(metrics)
  return current, losses


def _close(a, b, tolerance):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), a, b
  )


@pytest.mark.parametrize("carry", rotation.cases([False, True], [True]))
def test_accumulation_changes_nothing(carry):
  batches = [_batch(i, documents=not carry) for i in range(3)]
  config, mesh, start = _setup(carry_state=carry)
  whole, metrics = _run(config, mesh, start, batches)
  config.training.accumulation = 4
  parts, part_metrics = _run(config, mesh, start, batches)
  for a, b in zip(metrics, part_metrics, strict=True):
    assert int(a["tokens"]) == int(b["tokens"])
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(a["memory_norms"], b["memory_norms"], rtol=1e-5)
  _close(whole.carry, parts.carry, 1e-5)


def test_gradient_is_that_of_the_mean_over_all_scored_tokens():
  # Micro-batches of 1 to 4 rows have other numbers of scored tokens, so a mean
  # of means would differ.
  batch = _batch(0, documents=True)
  config, mesh, start = _setup(accumulation=4)
  config.optimizer.clip_norm = 1e6
  model = abstract.model_of(config.model)

  def mean(params):
    module = abstract.merge(model.graphdef, params)
    hidden, _ = module.hidden(batch.tokens, segment_ids=batch.segment_ids)
    sums = loss.next_token_loss(module.logits, hidden, batch.targets)
    return sums.nll / sums.count

  after, (metrics,) = _run(config, mesh, start, [batch])
  value, grads = jax.jit(jax.value_and_grad(mean))(start.params)
  np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
  moments = after.opt_state[1].mu
  _close(moments, grads, 1e-6)


def _poisoned(monkeypatch, *, value):
  """Spoils a batch that holds the target 255: its loss, or the gradient alone."""
  plain = loss.next_token_loss

  def poisoned(logits_of, hidden, targets, *, chunk=0):
    bad = (targets == 255).any()
    # Of the root of nothing, whose slope times nothing is not a number.
    nothing = jnp.sqrt(jnp.where(bad, 0.0 * hidden[0, 0, 0], 1.0)) * ~bad
    sums = plain(logits_of, hidden + 0 * nothing, targets, chunk=chunk)
    factor = jnp.where(bad & value, jnp.nan, 1.0)
    return sums._replace(nll=sums.nll * factor)

  monkeypatch.setattr(loss, "next_token_loss", poisoned)


@pytest.mark.parametrize(
  ("accumulation", "value"),
  rotation.cases([(1, True), (2, True), (1, False)], [(2, True)]),
)
def test_a_step_that_is_not_finite_is_skipped_and_counted(
  monkeypatch, accumulation, value
):
  _poisoned(monkeypatch, value=value)
  good, bad = _batch(0), _batch(1)
  bad.targets[-1, 3] = 255
  config, mesh, start = _setup(carry_state=True, accumulation=accumulation)
  after, metrics = _run(config, mesh, start, [good, bad, bad])
  once, _ = _run(config, mesh, start, [good])
  assert [int(m["skipped"]) for m in metrics] == [0, 1, 2]
  assert [int(m["skipped_in_a_row"]) for m in metrics] == [0, 1, 2]
  losses = [bool(np.isfinite(m["loss"])) for m in metrics]
  assert losses == [True, not value, not value]
  norms = [bool(np.isfinite(m["grad_norm"])) for m in metrics]
  assert norms == [True, False, False]
  assert int(after.step) == 3
  kept = lambda s: (s.params, s.opt_state, s.carry)  # noqa: E731
  jax.tree.map(np.testing.assert_array_equal, kept(after), kept(once))
  _, metrics = _run(config, mesh, after, [good])
  assert int(metrics[0]["skipped"]) == 2
  assert int(metrics[0]["skipped_in_a_row"]) == 0
  # A skipped step uses up no step of the schedule.
  _, twice = _run(config, mesh, once, [good])
  assert metrics[0]["learning_rate"] == twice[0]["learning_rate"]


def test_an_update_that_is_not_finite_is_skipped():
  config, mesh, start = _setup()
  config.optimizer.learning_rate = 1e38
  config.optimizer.weight_decay = 1e38
  config.optimizer.warmup_steps = 0
  after, (metrics,) = _run(config, mesh, start, [_batch(0)])
  assert int(metrics["skipped"]) == 1
  jax.tree.map(np.testing.assert_array_equal, after.params, start.params)


def test_the_carried_state_continues_each_row():
  config, mesh, start = _setup(carry_state=True)
  first, second = _batch(0), _batch(1)
  second = second._replace(positions=second.positions + 16)
  after, _ = _run(config, mesh, start, [first])
  model = abstract.model_of(config.model)

  @jax.jit
  def losses(carry):
    module = abstract.merge(model.graphdef, after.params)
    hidden, _ = module.hidden(
      second.tokens,
      state=carry,
      segment_ids=second.segment_ids,
    )
    sums = loss.next_token_loss(module.logits, hidden, second.targets)
    return sums.nll / sums.count

  _, (metrics,) = _run(config, mesh, after, [second])
  np.testing.assert_allclose(metrics["loss"], losses(after.carry), rtol=1e-6)
  assert abs(losses(after.carry) - losses(None)) > 1e-5


def test_a_new_document_at_the_start_of_a_batch_forgets_the_carry():
  config, mesh, start = _setup(carry_state=True)
  second = _batch(1)
  same, _ = _run(config, mesh, start, [_batch(0)])
  other, _ = _run(config, mesh, start, [_batch(5)])
  other = same._replace(carry=other.carry)
  new = second._replace(segment_ids=second.segment_ids + 1)
  old = second._replace(positions=second.positions + 16)
  results = {}
  for name, batch in (("new", new), ("old", old)):
    a, b = (_run(config, mesh, s, [batch])[1][0] for s in (same, other))
    results[name] = float(a["loss"]) == float(b["loss"])
  assert results == {"new": True, "old": False}


@pytest.mark.parametrize("carry", [False, True])
def test_learned_memories_are_learned(carry):
  config, mesh, start = _setup(carry_state=carry)
  # A document that starts within the batch starts from the learned memory.
  after, _ = _run(config, mesh, start, [_batch(0, documents=True)])
  flat = jax.tree_util.tree_leaves_with_path(after.opt_state[1].mu)
  zero = [jax.tree_util.keystr(p) for p, x in flat if np.abs(x).max() == 0]
  assert not zero


@pytest.mark.slow
def test_gradient_norm_is_that_before_clipping():
  config, mesh, start = _setup()
  config.optimizer.clip_norm = 1e6
  _, (free,) = _run(config, mesh, start, [_batch(0)])
  config, mesh, start = _setup()
  config.optimizer.clip_norm = float(free["grad_norm"]) / 100
  after, (clipped,) = _run(config, mesh, start, [_batch(0)])
  np.testing.assert_allclose(clipped["grad_norm"], free["grad_norm"], rtol=1e-5)
  moments = jax.tree.leaves(after.opt_state[1].mu)
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in moments))
  np.testing.assert_allclose(norm, config.optimizer.clip_norm, rtol=1e-4)


@pytest.mark.slow
def test_z_loss_and_loss_chunk():
  batches = [_batch(0, documents=True)]
  config, mesh, start = _setup()
  _, (a,) = _run(config, mesh, start, batches)
  assert float(a["z_loss"]) == 0
  config.training.z_loss = 0.1
  _, (b,) = _run(config, mesh, start, batches)
  assert float(b["z_loss"]) > 0 and float(a["loss"]) == float(b["loss"])
  assert float(a["grad_norm"]) != float(b["grad_norm"])
  config.training.loss_chunk = 5
  _, (c,) = _run(config, mesh, start, batches)
  np.testing.assert_allclose(c["loss"], b["loss"], rtol=1e-6)
  np.testing.assert_allclose(c["z_loss"], b["z_loss"], rtol=1e-6)
  np.testing.assert_allclose(c["grad_norm"], b["grad_norm"], rtol=1e-5)


def test_bytes_of_tokens_are_counted_where_they_are_scored():
  config, mesh, start = _setup()
  sizes = np.arange(256, dtype=np.int32)
  batch = _batch(0, documents=True)
  train_step = jax.jit(step.make_train_step(config, sizes))
  with jax.set_mesh(mesh):
    _, metrics = train_step(start, batch)
  assert int(metrics["bytes"]) == batch.targets[batch.targets >= 0].sum()


def test_one_batch_can_be_learned_by_heart():
  config, mesh, start = _setup(steps=60)
  config.optimizer.learning_rate = 2e-2
  _, metrics = _run(config, mesh, start, [_batch(0)] * 60)
  assert float(metrics[-1]["loss"]) < 0.5 * float(metrics[0]["loss"])


def test_a_step_is_compiled_once(monkeypatch):
  monkeypatch.undo()  # The real decoder: a number may be a parameter's start.
  config = training_cases.tiny(carry_state=True)
  config.data.packing = "stream"
  mesh = sharding.make_mesh(config.mesh)
  start = state.initial_state(config, mesh)
  with jax.set_mesh(mesh):
    after, _ = jax.eval_shape(step.make_train_step(config), start, _batch(0))
  kinds = lambda tree: [(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]  # noqa: E731
  assert kinds(start) == kinds(after)
