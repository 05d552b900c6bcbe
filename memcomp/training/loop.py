"""The loop over steps: signals, files and clocks around the pure step."""

import contextlib
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from memcomp import config as config_lib
from memcomp import errors
from memcomp.data import sources
from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.data.synthetic import task as task_lib
from memcomp.training import (
  checkpoint,
  metrics,
  processes,
  profiler,
  recorder,
  signals,
  step,
  validation,
  watchdog,
)
from memcomp.training import feed as feed_lib
from memcomp.training import state as state_lib


class Run(NamedTuple):
  """The constants of a training run.

  Attributes:
    config: validated config.
    workdir: absolute folder, claimed by this process.
    mesh: mesh in use (`jax.set_mesh`).
    tokenizer: tokenizer of the config.
    feed: training batches, from the first.
    validation: data of the validation loss, or None.
    meta: metadata that is saved with each checkpoint.
  """

  config: config_lib.Config
  workdir: pathlib.Path
  mesh: jax.sharding.Mesh
  tokenizer: tokenizer_lib.Tokenizer
  feed: feed_lib.Feed
  validation: sources.Split | None
  meta: dict[str, Any]


def train(
  run: Run,
  restored: checkpoint.Restored | None,
  checkpoints: checkpoint.Checkpoints,
  stop: signals.StopRequest,
) -> int:
  """Trains from `restored`, or from the start, to the last step.

  Returns:
    An exit code, see `run.run`. Unless it diverged, `workdir` has a committed
    checkpoint of the last step.
  """
  config = run.config
  training = config.training
  feed = run.feed
  if restored:
    feed.restore(restored.data)
    state = restored.state
  else:
    state = state_lib.initial_state(config, run.mesh)
  validate = None
  if run.validation is not None:
    validate = validation.make(
      config,
      run.validation,
      run.mesh,
      token_bytes(run.tokenizer, run.validation),
    )
  train_step = step.jitted(
    config, run.mesh, token_bytes(run.tokenizer, feed.store)
  )
  request = None if processes.is_alone() else processes.Request(run.mesh)
  done = restored.step if restored else 0
  progress = metrics.StepProgress(training.steps)
  with (
    metrics.open_log(
      run.workdir, resume_at=done, tensorboard=training.tensorboard
    ) as log,
    profiler.Window(training, run.workdir, progress.say, first=done) as window,
    progress,
    watchdog.Watchdog(
      training.watchdog_seconds,
      run.workdir / f"stacks-{jax.process_index()}.txt",
    ) as watch,
  ):
    record = recorder.Recorder(config, run.mesh, log, progress)
    batch, place = next(feed)
    shapes: set[tuple[int, ...]] = set()
    compiling, validated = 0, False
    for number in range(done + 1, training.steps + 1):
      last = number == training.steps
      evaluated = _due(number, training.evaluate_every)
      window.before(number - 1)
      asked = request and request(bool(stop.requested or progress.unread))
      if batch.tokens.shape not in shapes:
        watch.rest()
        shapes.add(batch.tokens.shape)
        compiling = number - done
      state, measured = train_step(state, batch, asked)
      window.after(number - 1, measured)
      # The device works on this step while the host fetches the next batch.
      following = None if last else next(feed)
      extra = {}
      if evaluated and validate:
        record.drain()
        jax.block_until_ready(measured)
        if not validated:
          watch.rest()
          validated = True
        start = time.perf_counter()
        extra = validate(state.params)
        record.pause(time.perf_counter() - start)
        watch.beat(number)
      logged = _due(number, training.log_every) or number == 1
      record.add(
        measured,
        slots=batch.tokens.size,
        logged=logged or evaluated or last,
        extra=extra,
      )
      # The watchdog starts after a compilation: it waits for the process that
      # compiles longest.
      if record.came_back >= compiling:
        watch.beat(number)
      checkpoints.poll()
      # Read once: a signal between two reads would stop without a save.
      cause = stop.requested or progress.unread
      stopped = record.stop if request else bool(cause)
      saving = _due(number, training.checkpoint_every) or last or stopped
      if saving:
        record.drain()
      if record.worst >= training.max_nonfinite_steps:
        record.drain()  # Python may crash if it ends while a GPU is at work
        return _diverged(record.worst, number, checkpoints)
      # Skipped steps learned nothing; saving would only remove older
      # checkpoints.
      if saving and (last or stopped or not record.skipped_in_a_row):
        log.check_place()
        checkpoints.save(number, state, place, run.meta)
        watch.beat(number)
      if stopped and not last:
        checkpoints.wait()
        progress.end()
        _report(
          f"{cause or 'another process was stopped'}: saved step {number} in"
          f" {checkpoints.place}; the same command goes on from there"
        )
        return errors.EXIT_RESUMABLE
      if following:
        batch, place = following
    checkpoints.wait()
  return 0


def _report(text: str) -> None:
  with contextlib.suppress(OSError):  # a pipe without reader, too
    print(text, file=sys.stderr, flush=True)


def token_bytes(
  tokenizer: tokenizer_lib.Tokenizer, store: sources.Split
) -> np.ndarray | None:
  """Returns the bytes of each token; None if each is one byte.

  If tokens do not spell the text of `store`, a token has its mean share of the
  text's bytes over all documents, float32. Parts of a mixture count by their
  weights; a part that spells its text, or does not know it, by its spelling.
  """
  sizes = tokenizer.bytes_of(np.arange(tokenizer.vocab_size))
  if isinstance(store, task_lib.Source) or store.sizes is None:
    return None if (sizes == 1).all() else sizes
  text, weight = _per_token(sizes, store)
  return (tokenizer_lib.weights(sizes) * (text / weight)).astype(np.float32)


def _per_token(sizes: np.ndarray, store: store_lib.TokenStore) -> np.ndarray:
  """Returns the mean bytes of text and the mean weight of a token."""
  if isinstance(store, store_lib.Concatenation):
    shares = [part.num_tokens for part in store.stores]
    if isinstance(store, store_lib.Mixture):
      shares = store.weights
    parts = [_per_token(sizes, part) for part in store.stores]
    return np.average(parts, axis=0, weights=shares)
  if store.sizes is not None:
    return np.array([x.sum() for x in store.sizes]) / store.num_tokens
  # Of some documents, because a corpus may be larger than memory.
  found, tokens = np.zeros(2), 0
  for document in range(0, len(store.lengths), 1 + len(store.lengths) // 64):
    stop = min(4096, int(store.lengths[document]))
    of_ids = sizes[store.read(document, 0, stop)]
    if store.scored is not None:
      of_ids = of_ids[store.scored.mask(document, 0, stop)]
    found += of_ids.sum(), tokenizer_lib.weights(of_ids).sum()
    tokens += stop
  return found / tokens


def _diverged(
  skipped: int, number: int, checkpoints: checkpoint.Checkpoints
) -> int:
  checkpoints.wait()
  steps = checkpoints.steps()
  kept = f"the checkpoint of step {steps[-1]} stays" if steps else "none saved"
  _report(
    f"error: diverged: loss or gradient was not finite in {skipped} steps in a "
    f"row, up to step {number} ({kept}); lower optimizer.learning_rate or "
    "raise optimizer.warmup_steps, in another --workdir"
  )
  return errors.EXIT_DIVERGED


def _due(number: int, every: int) -> bool:
  return every > 0 and number % every == 0
