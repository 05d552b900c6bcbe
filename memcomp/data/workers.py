"""Writes the units of `memcomp.data.prepare` in several processes."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from memcomp import errors
from memcomp.data import progress as progress_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.data import units


def run(
  corpus: units.Corpus,
  todo: list[units.Unit],
  tokenizer: tokenizer_lib.Tokenizer,
  workers: int,
  progress: progress_lib.PrepareProgress,
) -> Iterator[units.Unit]:
  """Writes units in any order.

  Args:
    corpus: corpus of the units.
    todo: the units.
    tokenizer: the corpus's tokenizer, loaded.
    workers: number of processes; 1 works in this process.
    progress: counts tokens while a unit is being written.

  Yields:
    Each unit when it is done.

  Raises:
    UserError: bad input, disk full, or a killed worker.
  """
  if workers == 1 or len(todo) <= 1:
    for unit in todo:
      units.write(corpus, unit, tokenizer, progress.add)
      yield unit
    return
  # Not fork, because the tokenizer library runs threads.
  context = multiprocessing.get_context("spawn")
  counter = context.Value("q", 0)
  pool = concurrent.futures.ProcessPoolExecutor(
    min(workers, len(todo)),
    mp_context=context,
    initializer=_start_worker,
    initargs=(corpus, counter),
  )
  waiting = {}
  try:
    with _interrupts_held_back() as interrupted:
      # Ctrl-C reaches the whole process group; workers inherit the block.
      signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
      waiting = {pool.submit(_work, unit): unit for unit in todo}
      signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
      while waiting:
        done, _ = concurrent.futures.wait(
          waiting,
          timeout=0.5,
          return_when=concurrent.futures.FIRST_COMPLETED,
        )
        # Without its lock, which a killed worker may hold forever.
        progress.set(counter.get_obj().value)
        for future in done:
          future.result()
          yield waiting.pop(future)
        if interrupted.is_set():
          raise KeyboardInterrupt
    pool.shutdown()
  except concurrent.futures.BrokenExecutor as error:
    raise errors.UserError(
      "a worker was killed, perhaps for want of memory; run the same command "
      "with fewer --workers"
    ) from error
  finally:
    if waiting:
      pool.shutdown(wait=False, cancel_futures=True)
      for child in multiprocessing.active_children():
        child.terminate()


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[threading.Event]:
  """Sets an event instead of raising on Ctrl-C and SIGTERM.

  An exception between two bytecodes could leave a lock of the pool held. The
  process would then wait for that lock at its end.
  """
  interrupted = threading.Event()
  before = {}
  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGINT, signal.SIGTERM):
      handler = signal.getsignal(number)
      if handler in (signal.default_int_handler, errors.terminate):
        before[number] = handler
        signal.signal(number, lambda *_: interrupted.set())
  try:
    yield interrupted
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


_worker: tuple[units.Corpus, tokenizer_lib.Tokenizer, Any]


def _start_worker(corpus: units.Corpus, counter: Any):
  global _worker
  threading.Thread(target=_leave_with_parent, daemon=True).start()
  _worker = corpus, tokenizer_lib.load(corpus.tokenizer), counter


def _leave_with_parent():
  # Workers outlive a killed parent: they would wait for work forever, or write
  # beside the next run.
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _work(unit: units.Unit):
  corpus, tokenizer, counter = _worker

  def progress(tokens: int):
    with counter.get_lock():
      counter.value += tokens

  units.write(corpus, unit, tokenizer, progress)
