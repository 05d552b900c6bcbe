"""Several processes as one run: on a pod slice, or started by hand.

Each process runs the same program on its own devices. The first alone writes
the run's files and prints; what one process finds (a mistake, a signal) all
must know, or the others wait for it in a collective for ever.
"""

import contextlib
import hashlib
import os
import pathlib
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import memcomp
import memcomp_kernels
from memcomp import errors
from memcomp.training import faults


def join(
  *,
  coordinator: str | None = None,
  count: int | None = None,
  index: int | None = None,
  heartbeat_seconds: int = 60,
) -> None:
  """Joins the run's other processes; call it before anything is computed.

  From here on JAX ends a process that has lost the others (see `faults`).

  Args:
    coordinator: "host:port" of the first process; None where JAX finds out by
      itself (Cloud TPU, Slurm, GKE).
    count: of processes; None likewise.
    index: of this one, from 0; None likewise.
    heartbeat_seconds: without a sign of life, after which a process is dead.

  Raises:
    UserError: they could not be found, or reached.
  """
  try:
    jax.distributed.initialize(
      coordinator, count, index, heartbeat_timeout_seconds=heartbeat_seconds
    )
  except (RuntimeError, ValueError) as error:
    raise errors.UserError(
      f"cannot join the run's other processes: {error}; on Cloud TPU start the"
      " same command on every host with --distributed, elsewhere give"
      " --coordinator=HOST:PORT, --processes and --process as well"
    ) from error
  faults.explain_aborts()
  if not is_first():
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def leave() -> None:
  """Parts from the other processes; nothing may be computed together after."""
  if not is_alone():
    # The first may still be writing; shutting down waits only so long.
    wait("end of the run")
    jax.distributed.shutdown()


def is_alone() -> bool:
  """Whether this is the run's only process."""
  return jax.process_count() == 1


def is_first() -> bool:
  """Whether this process writes files and prints."""
  return jax.process_index() == 0


@contextlib.contextmanager
def together(doing: str) -> Iterator[None]:
  """If the block raises a UserError in one process, all raise one.

  Anything else that one process raises ends it (see `faults`).
  """
  problem = None
  try:
    with faults.end_at_once(spare=(errors.UserError,)):
      yield
  except errors.UserError as error:
    problem = error
  if not is_alone():
    failed = multihost_utils.process_allgather(np.bool_(problem is not None))
    if problem is None and failed.any():
      problem = errors.UserError(
        f"process {int(np.argmax(failed))} stopped while {doing}; see what it"
        " printed"
      )
  if problem is not None:
    raise problem


def of_first(value: bool) -> bool:
  """What the first process says."""
  if is_alone():
    return value
  return bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))


def wait(name: str) -> None:
  """Waits for all processes to come to this place."""
  if not is_alone():
    multihost_utils.sync_global_devices(name)


def check_same(config: str) -> None:
  """Checks that all processes run the same code on the same config.

  Args:
    config: resolved, as text.

  Raises:
    UserError: naming the processes that differ from most.
  """
  if is_alone():
    return
  for what, text in (("config", config.encode()), ("code", _code())):
    digest = hashlib.sha256(text).digest()[:4]
    mine = np.frombuffer(digest, np.int32)
    found = multihost_utils.process_allgather(mine).reshape(-1)
    values, counts = np.unique(found, return_counts=True)
    odd = np.flatnonzero(found != values[np.argmax(counts)])
    if odd.size:
      raise errors.UserError(
        f"process {', '.join(map(str, odd))} of {found.size} runs another"
        f" {what} than the others; start all with the same"
      )


def _code() -> bytes:
  """All sources, so that two versions can be told apart."""
  parts = [jax.__version__.encode()]
  for package in (memcomp, memcomp_kernels):
    folder = pathlib.Path(next(iter(package.__path__)))
    for path in sorted(folder.rglob("*.py")):
      parts += [str(path.relative_to(folder)).encode(), path.read_bytes()]
  return b"\0".join(parts)


class Request:
  """A request to stop, handed into the step so that all processes see it.

  The step gives back the largest of what all processes handed in: each learns
  of it with the metrics of the same step, without waiting for the others.
  """

  def __init__(self, mesh: Mesh):
    """For the devices of `mesh`."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    here = sum(
      d.process_index == jax.process_index() for d in mesh.devices.flat
    )

    def array(value):
      return jax.make_array_from_process_local_data(
        sharding, np.full(here, value, np.int32)
      )

    self._arrays = array(0), array(1)

  def __call__(self, requested: bool) -> jax.Array:
    """The step's argument: int32 `[devices]`."""
    return self._arrays[requested]
