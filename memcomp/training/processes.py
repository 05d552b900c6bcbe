"""Several processes as one run: on a pod slice, or started by hand.

Each process runs the same program on its own devices. Only the first writes
files and prints. All must learn what one process finds (a mistake, a signal),
or they would wait forever in a collective.
"""

import contextlib
import hashlib
import json
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
from memcomp import errors, platforms
from memcomp.runs import workdir
from memcomp.training import faults

_SETTINGS = (
  "jax_enable_x64",
  "jax_default_matmul_precision",
  "jax_threefry_partitionable",
)
_SHORT = 200
"""Maximum characters of a fact in a message."""
_FIELDS = 8
"""Maximum number of differing fields of a config in a message."""


def join(
  *,
  distributed: bool = False,
  coordinator: str | None = None,
  count: int | None = None,
  index: int | None = None,
  heartbeat_seconds: int = 60,
) -> None:
  """Joins the run's other processes, if there are any.

  Call it before computing anything. From here on JAX ends a process that has
  lost the others (see `faults`).

  Args:
    distributed: JAX finds the others itself (Cloud TPU, Slurm, GKE).
    coordinator: "host:port" of the first process, if JAX cannot find it.
    count: number of processes; None if JAX finds it.
    index: index of this process, from 0; None if JAX finds it.
    heartbeat_seconds: time without a heartbeat after which a process is dead.

  Raises:
    UserError: the description is incomplete, or the others are not found or not
      reachable.
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
  """Checks the description of the processes.

  Raises:
    UserError: naming the missing or wrong flag.
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
  """Leaves the other processes; ends all joint computation."""
  if not is_alone():
    # The first may still be writing, and the shutdown has a time limit.
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
"""Facts that must be equal in all processes of a run."""


@contextlib.contextmanager
def together(doing: str) -> Iterator[dict[str, str]]:
  """If the block raises a UserError in one process, all raise one.

  They also raise if their facts differ. Any other exception ends its process
  (see `faults`).

  Args:
    doing: what the block does, for messages.

  Yields:
    A dict for the facts found, by name in `FACTS`.

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
      # The same exchanges in all, whether or not the block completed:
      # processes with different ones would wait for each other. The result of
      # the first exchange, equal in all, decides whether there is a second.
      digests = [_digest(seen.get(name)) for name in FACTS]
      mine = np.array([[problem is not None, 0], *digests], np.int32)
      found = multihost_utils.process_allgather(mine)
      failed = np.flatnonzero(found[:, 0, 0])
      differs = _differing(found[:, 1:])
      texts = None
      facts = {name for wrong in differs.values() for name in wrong}
      if not failed.size and "config" in facts and "code" not in facts:
        texts = _gather(seen.get("config", ""))
      problem = problem or _difference(differs, len(found), seen, texts)
      if problem is None and failed.size:
        problem = errors.UserError(
          f"process {failed[0]} stopped while {doing}; see what it printed"
        )
    if problem is not None:
      raise problem


def _digest(text: str | None) -> np.ndarray:
  """Returns a hash as int32 `[2]`; zeros for a missing fact."""
  if text is None:
    return np.zeros(2, np.int32)
  return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int32)


def _gather(text: str) -> list[str]:
  """Returns the texts of all processes."""
  own = np.frombuffer(text.encode(), np.uint8)
  lengths = multihost_utils.process_allgather(np.int32(len(own)))
  padded = np.pad(own, (0, int(lengths.max()) - len(own)))
  every = multihost_utils.process_allgather(padded)
  return [
    bytes(line[:length]).decode()
    for line, length in zip(every, lengths, strict=True)
  ]


def _differing(found: np.ndarray) -> dict[int, dict[str, int]]:
  """Returns the processes that deviate, and in which facts.

  Args:
    found: int32 `[processes, facts, 2]`, see `_digest`.

  Returns:
    For each deviating process and fact, a process with the most common value.
  """
  differs: dict[int, dict[str, int]] = {}
  for fact, name in enumerate(FACTS):
    every = [tuple(x) for x in found[:, fact].tolist()]
    known = [x for x in every if any(x)]
    # In a tie, the first process is right.
    usual = max(known, key=known.count, default=())
    for process, own in enumerate(every):
      if any(own) and own != usual:
        differs.setdefault(process, {})[name] = every.index(usual)
  return differs


def _difference(
  differs: dict[int, dict[str, int]],
  count: int,
  seen: dict[str, str],
  configs: list[str] | None,
) -> errors.UserError | None:
  """Returns an error that names the deviating processes and facts, or None.

  Args:
    differs: see `_differing`.
    count: number of processes.
    seen: facts of this process.
    configs: those of all processes as JSON, if they were exchanged.
  """
  if not differs:
    return None
  who = []
  for process, wrong in sorted(differs.items()):
    facts = list(wrong)
    if configs and "config" in wrong:
      right = json.loads(configs[wrong["config"]])
      fields = workdir.differences(
        right, json.loads(configs[process]), words="{0} {2!r}, others {1!r}"
      )
      shown = [line[:_SHORT] for line in fields[:_FIELDS]]
      if more := len(fields) - len(shown):
        shown.append(f"and {more} more")
      facts[facts.index("config")] += f" ({'; '.join(shown)})"
    who.append(f"process {process} in its {' and '.join(facts)}")
  names = {name for wrong in differs.values() for name in wrong}
  here = [
    f"{name} {seen[name]}"
    for name in FACTS
    if name in names and len(seen.get(name, "")) in range(1, _SHORT)
  ]
  return errors.UserError(
    f"of the run's {count} processes these differ from the others:"
    f" {', '.join(who)}{'; here: ' * bool(here)}{', '.join(here)}; give all the"
    " same"
  )


def of_first(value: bool) -> bool:
  """Returns the value of the first process."""
  if is_alone():
    return value
  return bool(multihost_utils.broadcast_one_to_all(np.bool_(value)))


def wait(name: str) -> None:
  """Waits until all processes have reached this call."""
  if not is_alone():
    multihost_utils.sync_global_devices(name)


def program() -> dict[str, str]:
  """Returns the `FACTS` about the program; none for a single process."""
  if is_alone():
    return {}
  return {
    "code": _code(),
    "versions": ", ".join(map(" ".join, platforms.versions().items())),
    "JAX settings": ", ".join(
      f"{name} {getattr(jax.config, name)}" for name in _SETTINGS
    ),
  }


def _code() -> str:
  """Returns a hash of all sources, which identifies the version."""
  digest = hashlib.sha256()
  for package in (memcomp, memcomp_kernels):
    folder = pathlib.Path(next(iter(package.__path__)))
    for path in sorted(folder.rglob("*.py")):
      digest.update(f"{path.relative_to(folder)}\0".encode())
      digest.update(path.read_bytes())
  return digest.hexdigest()[:16]


class Request:
  """A request to stop, passed into the step so that all processes see it.

  The step returns the maximum over all processes. So each process learns of it
  with the metrics of the same step, without waiting for the others.
  """

  def __init__(self, mesh: Mesh):
    """Makes requests for the devices of `mesh`."""
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
    """Returns the step's argument: int32 `[devices]`."""
    return self._arrays[requested]
