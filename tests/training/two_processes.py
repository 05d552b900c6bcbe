"""Two processes of four fake devices each, over loopback, as one run."""

import contextlib
import json
import socket
import time

import training_cases

FLAGS = (
  "--config.mesh.replica=2",
  "--config.mesh.fsdp=4",
  "--config.training.batch_size=8",
)
"""Of a run on eight devices, in however many processes."""


def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def start(
  config,
  workdir,
  *flags,
  others=(),
  other_root=training_cases.ROOT,
  folders=(None, None),
  each=4,
):
  """Starts the processes; all but the first have `others` as flags.

  They run the program of `other_root`. Each works in its own of `folders`, of
  which there are as many as processes, and has `each` devices.
  """
  port = free_port()
  return [
    training_cases.start(
      config,
      workdir,
      *FLAGS,
      *flags,
      *(others if index else ()),
      f"--coordinator=127.0.0.1:{port}",
      f"--processes={len(folders)}",
      f"--process={index}",
      root=other_root if index else training_cases.ROOT,
      cwd=folder,
      XLA_FLAGS=f"--xla_force_host_platform_device_count={each}",
    )
    for index, folder in enumerate(folders)
  ]


@contextlib.contextmanager
def running(*args, **kwargs):
  """As `start`; whatever of them is left at the end is killed."""
  both = start(*args, **kwargs)
  try:
    yield both
  finally:
    for process in both:
      process.kill()
      process.communicate()


def end(process):
  """Waits for one to end: (exit code, stdout, stderr)."""
  out, err = process.communicate(timeout=240)
  return process.returncode, out, err


def ends(processes):
  return [end(process) for process in processes]


def logged(workdir):
  """The last step in the log, 0 without any."""
  metrics = workdir / "metrics.jsonl"
  # The last line may be half written.
  lines = metrics.read_text().split("\n") if metrics.exists() else []
  return json.loads(lines[-2])["step"] if len(lines) > 1 else 0


def wait_for_step(processes, workdir, step):
  """Waits until a step is in the log, while both run."""
  while logged(workdir) < step:
    assert all(p.poll() is None for p in processes), ends(processes)
    time.sleep(0.05)
