"""Several processes as one run: on a pod slice, or started by hand.

Each process runs the same program on its own devices. The first alone writes
the run's files and prints; what one process finds (a mistake, a signal) all
must know, or the others wait for it in a collective for ever.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
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

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_SETTINGS = (
  "jax_enable_x64",
  "jax_default_matmul_precision",
  "jax_threefry_partitionable",
)
_SHORT = 200
"""Characters of what is told in a message."""


def join(
  *,
  distributed: bool = False,
  coordinator: str | None = None,
  count: int | None = None,
  index: int | None = None,
  heartbeat_seconds: int = 60,
) -> None:
  """Joins the run's other processes, if there are others.

  Call it before anything is computed. From here on JAX ends a process that has
  lost the others (see `faults`).

  Args:
    distributed: JAX finds the others by itself (Cloud TPU, Slurm, GKE).
    coordinator: "host:port" of the first process, where JAX does not.
    count: of processes; None where JAX finds it.
    index: of this one, from 0; None where JAX finds it.
    heartbeat_seconds: without a sign of life, after which a process is dead.

  Raises:
    UserError: they are not described, could not be found, or not be reached.
  """
  _check(distributed, coordinator, count, index)
  if not distributed and coordinator is None:
    return
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
    sys.stdout = open(  # noqa: SIM115
      os.devnull, "w", errors="backslashreplace"
    )


def _check(
  distributed: bool,
  coordinator: str | None,
  count: int | None,
  index: int | None,
) -> None:
  """Checks what describes the processes.

  Raises:
    UserError: naming the flag that is missing or wrong.
  """
  if coordinator is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
      raise errors.UserError(
        f"--coordinator={coordinator}: write HOST:PORT of process 0, as in"
        " --coordinator=10.0.0.1:1234"
      )
  elif not distributed:
    for flag, value in (("processes", count), ("process", index)):
      if value is not None:
        raise errors.UserError(
          f"--{flag}={value}: several processes meet at one of them; add"
          " --coordinator=HOST:PORT of process 0, or --distributed where JAX"
          " finds it"
        )
  if count is not None and index is not None and index >= count:
    raise errors.UserError(
      f"--process={index}: of --processes={count} the last is"
      f" --process={count - 1}"
    )


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


FACTS = (
  "config",
  "code",
  "versions",
  "JAX settings",
  "tokenizer",
  "training data",
  "validation data",
  "checkpoints",
  "folder of checkpoints",
  "parameters to begin from",
)
"""What has to be the same in all processes of a run."""


@contextlib.contextmanager
def together(doing: str) -> Iterator[dict[str, str]]:
  """If the block raises a UserError in one process, all raise one.

  They also do if what the block has found is not the same in all. Anything else
  that one process raises ends it (see `faults`).

  Args:
    doing: what the block does, for messages.

  Yields:
    A dict to fill: some of `FACTS`, and what was found.

  Raises:
    UserError: see above.
  """
  seen: dict[str, str] = {}
  problem = None
  with faults.end_at_once(spare=(errors.UserError,)):
    try:
      yield seen
    except errors.UserError as error:
      problem = error
    if not is_alone():
      # One exchange, whether or not the block came to its end: processes that
      # exchange different things wait for each other.
      digests = [_digest(seen.get(name)) for name in FACTS]
      mine = np.array([[problem is not None, 0], *digests], np.int32)
      found = multihost_utils.process_allgather(mine)
      problem = problem or _difference(found[:, 1:], seen)
      failed = np.flatnonzero(found[:, 0, 0])
      if problem is None and failed.size:
        problem = errors.UserError(
          f"process {failed[0]} stopped while {doing}; see what it printed"
        )
    if problem is not None:
      raise problem


def _digest(text: str | None) -> np.ndarray:
  """Returns a hash as int32 `[2]`, zeros of what was not found."""
  if text is None:
    return np.zeros(2, np.int32)
  return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int32)


def _difference(
  found: np.ndarray, seen: dict[str, str]
) -> errors.UserError | None:
  """Returns an error that names who differs from most in what, or None.

  Args:
    found: int32 `[processes, facts, 2]`.
    seen: by this process.
  """
  differs: dict[int, list[str]] = {}
  for fact, name in enumerate(FACTS):
    every = [tuple(x) for x in found[:, fact].tolist()]
    known = [x for x in every if any(x)]
    # Of equally many the first process is right.
    usual = max(known, key=known.count, default=None)
    for process, own in enumerate(every):
      if any(own) and own != usual:
        differs.setdefault(process, []).append(name)
  if not differs:
    return None
  who = ", ".join(
    f"process {process} in its {' and '.join(names)}"
    for process, names in sorted(differs.items())
  )
  names = {name for names in differs.values() for name in names}
  here = [
    f"{name} {seen[name]}"
    for name in FACTS
    if name in names and len(seen.get(name, "")) in range(1, _SHORT)
  ]
  return errors.UserError(
    f"of the run's {len(found)} processes these differ from the others: {who}"
    f"{'; here: ' * bool(here)}{', '.join(here)}; give all the same"
  )


def of_first(value: bool) -> bool:
  """What the first process says."""
  if is_alone():
    return value
  return bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))


def wait(name: str) -> None:
  """Waits for all processes to come to this place."""
  if not is_alone():
    multihost_utils.sync_global_devices(name)


def program() -> dict[str, str]:
  """Returns what of `FACTS` is known of the program; nothing of one alone."""
  if is_alone():
    return {}
  return {
    "code": _code(),
    "versions": ", ".join(f"{k} {v}" for k, v in versions().items()),
    "JAX settings": ", ".join(
      f"{name} {getattr(jax.config, name)}" for name in _SETTINGS
    ),
  }


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the libraries that compute."""
  return {
    "python": platform.python_version(),
    **{name: importlib.metadata.version(name) for name in _PACKAGES},
  }


def _code() -> str:
  """Hash of all sources, so that two versions can be told apart."""
  digest = hashlib.sha256()
  for package in (memcomp, memcomp_kernels):
    folder = pathlib.Path(next(iter(package.__path__)))
    for path in sorted(folder.rglob("*.py")):
      digest.update(f"{path.relative_to(folder)}\0".encode())
      digest.update(path.read_bytes())
  return digest.hexdigest()[:16]


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
