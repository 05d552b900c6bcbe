"""The pure training step and the pure validation step.

Both are functions of arrays, made from the config; the caller jits them. They
do not access files, clocks or host state.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from memcomp import config as config_lib
from memcomp import prng
from memcomp.data import batch as batch_lib
from memcomp.models import abstract
from memcomp.training import loss as loss_lib
from memcomp.training import optimizer, passing
from memcomp.training import state as state_lib
from memcomp_kernels import dispatch
from memcomp_kernels.math import solver

Metrics = dict[str, jax.Array]
TrainStep = Callable[
  [state_lib.TrainState, batch_lib.Batch],
  tuple[state_lib.TrainState, Metrics],
]


class _Watch(NamedTuple):
  """RMS of memories `[layers]`, and optional solver statistics."""

  norms: jax.Array
  solved: solver.Stats | None


def make_train_step(
  config: config_lib.Config, token_bytes: np.ndarray | None = None
) -> TrainStep:
  """Returns `(state, batch) -> (state, metrics)`, one optimizer step.

  Jit it under `jax.set_mesh(mesh)` and donate the state. Arguments bring their
  shardings, and the model constrains its own. The loss is the mean over all
  scored tokens of the step, regardless of micro-batches and shards. If loss,
  gradient or update is not finite, the step keeps parameters, optimizer and
  carry, and is counted.

  Args:
    config: validated config (`validate.check`).
    token_bytes: int32 or float32 `[vocab]`, bytes of each token; None is one.

  Returns:
    The step. Its metrics: float32 `loss` (nats per scored token, without the
    z-loss), `z_loss` (weighted), `grad_norm` (before clipping),
    `learning_rate`, `memory_norms` `[layers]`; int32 `step`, `tokens` (scored),
    `bytes` (of the scored tokens), `skipped`, `skipped_in_a_row`; for a task
    also float32 `accuracy`, the share of right answers; with layers that use
    sweeps also float32 `sweeps` (per block), `residual` and `unreached`, each
    `[layers]`.
  """
  model = abstract.model_of(config.model)
  tx = state_lib.make_optimizer(config, model)
  schedule = optimizer.make_schedule(config.optimizer, config.training.steps)
  parts = config.training.accumulation
  axes = state_lib.row_axes(config, model)

  random = any(mixer.random for mixer in config.model.layer_mixers())

  def objective(params, batch, carry, passed, tokens, noise):
    begin = None
    if carry is not None:
      begin = functools.partial(
        passing.begin,
        config,
        batch=batch,
        carry=carry,
        axes=axes,
        passed=passed,
      )
    sums, carry, watch = _forward(model, config, params, batch, begin, noise)
    total = sums.nll + config.training.z_loss * sums.log_z_squared
    return total / tokens, (sums, carry, watch)

  gradient = jax.grad(objective, has_aux=True)

  def accumulate(params, batch, carry, passed, tokens, noise):
    if parts == 1:
      return gradient(params, batch, carry, passed, tokens, noise)

    def body(total, part):
      *part, index = part
      own = None if noise is None else jax.random.fold_in(noise, index)
      grads, (sums, carry, watch) = gradient(params, *part, tokens, own)
      return jax.tree.map(jnp.add, total, (grads, sums)), (carry, watch)

    zero = (jax.tree.map(jnp.zeros_like, params), loss_lib.zero())
    split = (
      jax.tree.map(lambda x: _split(x, parts), batch),
      jax.tree.map(lambda x, axis: _split(x, parts, axis), carry, axes),
      jax.tree.map(lambda x: _split(x, parts), passed),
      jnp.arange(parts),
    )
    (grads, sums), (carry, watch) = jax.lax.scan(body, zero, split)
    carry = jax.tree.map(_join, carry, axes)
    norms, stats = watch
    watch = _Watch(
      jnp.sqrt((norms**2).mean(0)),
      None if stats is None else solver.total(stats),
    )
    return grads, (sums, carry, watch)

  def train_step(state, batch):
    counted = (batch.targets >= 0).sum(dtype=jnp.int32)
    tokens = jnp.maximum(counted, 1).astype(jnp.float32)
    # Depends only on seed and step, so that a resumed run draws the same.
    noise = None
    if random:
      noise = jax.random.fold_in(prng.key(config.seed), state.step)
    passed = passing.drawn(config, state.step)
    grads, (sums, carry, watch) = accumulate(
      state.params, batch, state.carry, passed, tokens, noise
    )
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    grad_norm = _norm(grads)
    finite = _finite(sums.nll, grad_norm, _norm(updates), carry)
    new = (optax.apply_updates(state.params, updates), opt_state, carry)
    old = (state.params, state.opt_state, state.carry)
    params, opt_state, carry = jax.tree.map(
      lambda n, o: jnp.where(finite, n, o), new, old
    )
    one = jnp.int32(~finite)
    metrics = {
      "step": state.step + 1,
      "loss": sums.nll / tokens,
      "z_loss": config.training.z_loss * sums.log_z_squared / tokens,
      "grad_norm": grad_norm,
      # The optimizer counts updates, so a skipped step uses none up.
      "learning_rate": schedule(state.step - state.skipped),
      "memory_norms": watch.norms,
      "tokens": counted,
      "bytes": _bytes(batch.targets, token_bytes),
      "skipped": state.skipped + one,
      "skipped_in_a_row": (state.skipped_in_a_row + 1) * one,
    }
    if config.data.task is not None:
      metrics["accuracy"] = sums.right / tokens
    if watch.solved is not None:
      metrics |= _solver_metrics(watch.solved)
    return state_lib.TrainState(
      params=params,
      opt_state=opt_state,
      step=metrics["step"],
      skipped=metrics["skipped"],
      skipped_in_a_row=metrics["skipped_in_a_row"],
      carry=carry,
    ), metrics

  return train_step


def jitted(
  config: config_lib.Config,
  mesh: jax.sharding.Mesh,
  token_bytes: np.ndarray | None = None,
) -> Any:
  """Returns the step of `make_train_step`, jitted with a donated state.

  It also takes the array of `processes.Request` (or None), and adds its maximum
  to the metrics as `stop`.
  """
  target = state_lib.abstract_state(config, mesh)
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  train_step = make_train_step(config, token_bytes)

  def step(state, batch, request=None):
    state, metrics = train_step(state, batch)
    if request is not None:
      metrics["stop"] = request.max()
    return state, metrics

  return jax.jit(
    step,
    donate_argnums=0,
    # Explicit, so that every state buffer comes back with the same sharding.
    out_shardings=(abstract.shardings_of(target), replicated),
  )


def make_validation_step(
  config: config_lib.Config, token_bytes: np.ndarray | None = None
) -> Callable[[Any, batch_lib.Batch, Any], tuple[Metrics, Any]]:
  """Returns `(params, batch, carry) -> (sums, carry)`.

  The sums are float32 `nll` in nats, and int32 `tokens` (scored), `bytes` and
  `right` (see `loss.LossSums`).
  """
  model = abstract.model_of(config.model)

  def validation_step(params, batch, carry):
    begin = None if carry is None else lambda module: carry
    sums, carry, _ = _forward(model, config, params, batch, begin)
    return {
      "nll": sums.nll,
      "tokens": sums.count,
      "bytes": _bytes(batch.targets, token_bytes),
      "right": sums.right,
    }, carry

  return validation_step


def _forward(model, config, params, batch, begin=None, noise=None):
  """Returns (loss sums, state to carry, watched values).

  `begin` maps the module to the state before the batch; None is a fresh one.
  """
  extra = {} if noise is None else {"noise": noise}
  prefer = dispatch.default_implementation(config.training.implementation)
  with prefer:
    module = nnx.merge(model.graphdef, params)
    embedding, head = module.tables()
    hidden, state, solved = module.with_stats(
      batch.tokens,
      state=None if begin is None else begin(module),
      segment_ids=batch.segment_ids,
      table=embedding,
      **extra,
    )
    sums = loss_lib.next_token_loss(
      functools.partial(module.logits, table=head),
      hidden,
      batch.targets,
      chunk=config.training.loss_chunk,
    )
    watch = _Watch(module.memory_norms(state), solved)
  return sums, None if begin is None else state, jax.lax.stop_gradient(watch)


def _solver_metrics(stats: solver.Stats) -> Metrics:
  """Returns metrics of the solver statistics of all layers."""
  return {
    "sweeps": stats.sweeps / jnp.maximum(stats.blocks, 1),
    "residual": stats.residual,
    "unreached": stats.unreached,
  }


def _split(x: jax.Array, parts: int, axis: int = 0) -> jax.Array:
  """Splits rows into `[parts, ...]`; part p takes rows p, p + parts, ...

  The stride keeps each row on its shard.
  """
  shape = (*x.shape[:axis], -1, parts, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _join(x: jax.Array, axis: int) -> jax.Array:
  """Reverses `_split`."""
  x = jnp.moveaxis(x, 0, axis + 1)
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _bytes(targets, token_bytes):
  scored = targets >= 0
  if token_bytes is None:
    return scored.sum(dtype=jnp.int32)
  lengths = jnp.asarray(token_bytes)[jnp.maximum(targets, 0)]
  return jnp.where(scored, lengths, 0).sum(dtype=lengths.dtype)


def _norm(tree: Any) -> jax.Array:
  """Returns the root of the sum of all squares."""
  return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def _finite(*trees: Any) -> jax.Array:
  leaves = jax.tree.leaves(trees)
  return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
