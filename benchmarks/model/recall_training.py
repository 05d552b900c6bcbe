"""Training small decoders on MQAR, for the benchmarks that compare memories.

Two layers of d_model 64. One protocol for all memories: short rows with the
fewest pairs first, then whole rows with all numbers of pairs in turn.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx

from memcomp import config as config_lib
from memcomp.data.synthetic import mqar
from memcomp.models import abstract, decoder, small
from memcomp.training import optimizer as optimizer_lib

FRESH_ROWS = 512
_WARMUP = 50
_BLOCK = 50  # updates a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What is learned, and for how long."""

  pairs: tuple[int, ...]
  length: int
  vocab_size: int
  steps: int
  batch: int
  learning_rate: float
  optimizer: str = "adamw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
  """What is kept of a run.

  Attributes:
    accuracy: on fresh rows, by number of pairs.
    by_length: on fresh rows of the fewest pairs, each asked for at any place
      after them, by length.
    losses: nats per answer, of every update.
    grad_norms: of every update, before clipping.
  """

  accuracy: dict[int, float]
  by_length: dict[int, float]
  losses: np.ndarray
  grad_norms: np.ndarray


def model_config(
  mixer: str, task: Task, head_dim: int = 32
) -> decoder.DecoderConfig:
  """A small decoder around the mixer."""
  return small.recall_model(
    mixer,
    vocab_size=task.vocab_size,
    length=task.length,
    head_dim=head_dim,
  )


def rows_at(task: Task, step: int) -> tuple[int, int, int]:
  """Rows, tokens a row and pairs a row of an update.

  In the first half only the fewest pairs, in more and shorter rows of as many
  tokens in all. A long row of few pairs is mostly filler, and answers change
  in two jumps: to any of the row's values, then to the right one. Trellis
  makes neither in the time given here if it begins with long rows or with
  several numbers of pairs at once.
  """
  if step >= task.steps // 2:
    return task.batch, task.length, task.pairs[step % len(task.pairs)]
  length = min(task.length, 8 * task.pairs[0])
  return task.batch * task.length // length, length, task.pairs[0]


def make_optimizer(
  config: decoder.DecoderConfig, task: Task
) -> optax.GradientTransformation:
  """AdamW with decay of all parameters, or the trainer's Muon.

  That decays the matrices only, and updates all others with AdamW.
  """
  warmup = min(_WARMUP, task.steps // 4)
  settings = config_lib.OptimizerConfig(
    name=task.optimizer,
    learning_rate=task.learning_rate,
    final_learning_rate=0.0,
    warmup_steps=warmup,
    b2=0.98,
    weight_decay=0.1,
    clip_norm=1.0,
  )
  if task.optimizer != "adamw":
    masks = abstract.model_of(config).masks
    return optimizer_lib.make(settings, task.steps, masks)
  rate = optax.warmup_cosine_decay_schedule(
    0.0, settings.learning_rate, warmup, task.steps
  )
  return optax.chain(
    optax.clip_by_global_norm(settings.clip_norm),
    optax.adamw(rate, b2=settings.b2, weight_decay=settings.weight_decay),
  )


def stack(trees: list[Any]) -> Any:
  """Stacks equal trees on a new first axis."""
  return jax.tree.map(
    # With the types of what an update returns, or it is compiled twice.
    lambda *x: jnp.stack(x).astype(jnp.asarray(x[0]).dtype),
    *trees,
  )


def train(
  config: decoder.DecoderConfig,
  task: Task,
  seeds: list[int],
  lengths: tuple[int, ...] = (),
  filler: bool = False,
) -> list[Trained]:
  """Trains on mqar-fast and answers fresh rows.

  All seeds side by side, one more axis of every array: small products cost
  little more for several seeds than for one.

  Args:
    config: of the model.
    task: what is learned.
    seeds: of parameters and rows.
    lengths: tokens of the rows of `Trained.by_length`.
    filler: whether values drawn anew stand between the questions, all of them
      to be forgotten; else it is one token, which is easily ignored.
  """

  def fresh_params(seed):
    return nnx.split(decoder.Decoder(config, rngs=nnx.Rngs(seed)))

  made = [fresh_params(seed) for seed in seeds]
  graph, params = made[0][0], stack([params for _, params in made])
  optimizer = make_optimizer(config, task)

  def logits_of(params, inputs):
    return nnx.merge(graph, params)(inputs)

  def loss_of(params, inputs, labels):
    asked = labels != mqar.IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits_of(params, inputs), jnp.where(asked, labels, 0)
    )
    return jnp.sum(jnp.where(asked, losses, 0)) / jnp.sum(asked)

  @jax.vmap
  def update(params, moments, inputs, labels):
    loss, gradient = jax.value_and_grad(loss_of)(params, inputs, labels)
    change, moments = optimizer.update(gradient, moments, params)
    params = optax.apply_updates(params, change)
    return params, moments, (loss, optax.global_norm(gradient))

  @functools.partial(jax.jit, donate_argnums=0)
  def updates(carry, rows):
    def body(carry, row):
      *carry, measured = update(*carry, *row)
      return tuple(carry), measured

    return jax.lax.scan(body, carry, rows)

  @jax.jit
  @jax.vmap
  def hits(params, inputs, labels):
    asked = labels != mqar.IGNORED
    right = jnp.argmax(logits_of(params, inputs), axis=-1) == labels
    return jnp.sum(right & asked) / jnp.sum(asked)

  def rows(count, length, pairs, offset, **law):
    """Inputs and labels `[seeds, count, length]`; the offset of seed 0."""
    found = [
      mqar.fast(
        vocab_size=task.vocab_size,
        num_examples=count,
        length=length,
        pairs=pairs,
        seed=2**20 * seed + offset,
        **law,
      )
      for seed in seeds
    ]
    inputs, labels = (
      np.stack(x).astype(np.int32) for x in zip(*found, strict=True)
    )
    if filler:
      rng = np.random.default_rng(offset)
      values = rng.integers(task.vocab_size // 2, task.vocab_size, inputs.shape)
      inputs = np.where(inputs == 0, values, inputs).astype(np.int32)
    return [inputs, labels]

  def block(steps):
    batches = [rows(*rows_at(task, i), 2**20 + i) for i in steps]
    return [np.stack(x) for x in zip(*batches, strict=True)]

  carry, history = (params, jax.vmap(optimizer.init)(params)), []
  half = task.steps // 2
  halves = range(half), range(half, task.steps)
  blocks = (x[i : i + _BLOCK] for x in halves for i in range(0, len(x), _BLOCK))
  for steps in blocks:
    carry, measured = updates(carry, block(steps))
    history.append(np.stack(measured))
    logging.info("update %d: loss %s", steps[-1] + 1, history[-1][0].mean(0))
  losses, grad_norms = np.concatenate(history, axis=1).transpose(0, 2, 1)
  # Rows of an update begin at 2**20: those before are never trained on.
  right = {
    n: hits(carry[0], *rows(FRESH_ROWS, task.length, n, 0)) for n in task.pairs
  }
  far = {
    length: hits(
      carry[0], *rows(FRESH_ROWS, length, task.pairs[0], 0, power=1.0)
    )
    for length in lengths
  }
  return [
    Trained(
      accuracy={n: float(x[i]) for n, x in right.items()},
      by_length={n: float(x[i]) for n, x in far.items()},
      losses=losses[i],
      grad_norms=grad_norms[i],
    )
    for i in range(len(seeds))
  ]
