"""Two processes of four devices are one run, as one of eight is."""

import json
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import training_cases

FLAGS = (
  "--config.mesh.replica=2",
  "--config.mesh.fsdp=4",
  "--config.training.batch_size=8",
  "--config.training.steps=100",
  "--config.training.checkpoint_every=60",
)


def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def start_two(config, workdir, *flags, others=()):
  """Starts the two processes; `others` are flags of the second alone."""
  port = free_port()
  return [
    training_cases.start(
      config,
      workdir,
      *FLAGS,
      *flags,
      *(others if index else ()),
      f"--coordinator=127.0.0.1:{port}",
      "--processes=2",
      f"--process={index}",
      XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    for index in range(2)
  ]


def ends(processes):
  found = []
  for process in processes:
    out, err = process.communicate(timeout=240)
    found.append((process.returncode, out, err))
  return found


def losses(workdir):
  return [record["loss"] for record in training_cases.curve(workdir)]


def assert_same_losses(ours, expected):
  """Sums are taken in another order: training lets that grow, slowly.

  Another batch would change a loss by a tenth.
  """
  np.testing.assert_allclose(ours[:20], expected[:20], rtol=1e-6)
  np.testing.assert_allclose(ours, expected, rtol=1e-3)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return training_cases.write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def one_process(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "one"
  code, _, err = training_cases.train(
    config,
    workdir,
    *FLAGS,
    XLA_FLAGS="--xla_force_host_platform_device_count=8",
  )
  assert code == 0, err
  return losses(workdir)


def test_the_losses_of_one_process_and_one_set_of_files(
  config, one_process, tmp_path
):
  workdir = tmp_path / "two"
  (code, out, err), (code_b, out_b, err_b) = ends(start_two(config, workdir))
  assert (code, code_b) == (0, 0), err + err_b
  assert_same_losses(losses(workdir), one_process)
  assert "step 100/100" in out and "step" not in out_b
  assert (workdir / "config.json").exists()


def test_a_signal_to_one_stops_both_and_one_process_goes_on(
  config, one_process, tmp_path
):
  workdir = tmp_path / "two"
  both = start_two(config, workdir)
  metrics = workdir / "metrics.jsonl"
  while not metrics.exists() or not metrics.read_text():
    assert all(p.poll() is None for p in both), ends(both)
    time.sleep(0.05)
  both[1].send_signal(signal.SIGTERM)
  (code, _, err), (code_b, _, err_b) = ends(both)
  assert (code, code_b) == (42, 42), err + err_b
  assert "another process was stopped" in err and "SIGTERM" in err_b
  assert len(losses(workdir)) < 100
  code, _, err = training_cases.train(
    config,
    workdir,
    *FLAGS,
    XLA_FLAGS="--xla_force_host_platform_device_count=8",
  )
  assert code == 0, err
  assert_same_losses(losses(workdir), one_process)


def test_a_process_with_another_config_is_named(config, tmp_path):
  workdir = tmp_path / "two"
  both = start_two(
    config, workdir, others=["--config.optimizer.learning_rate=1e-3"]
  )
  for code, _, err in ends(both):
    assert code == 2
    assert "runs another config" in err
  assert not workdir.exists()


def test_a_mistake_in_one_ends_both(config, tmp_path):
  workdir = tmp_path / "two"
  workdir.mkdir()
  (workdir / "metrics.jsonl").write_text("{}\n")
  both = start_two(config, workdir)
  for code, _, err in ends(both):
    assert code == 2
    assert "no config.json" in err


def test_parts_of_a_batch():
  """Rows are read once: by each process its own, or by all that share them."""
  program = """
import json, sys
from memcomp import config, sharding
from memcomp.training import processes
processes.join(coordinator=sys.argv[1], count=2, index=int(sys.argv[2]))
found = []
for sizes in json.loads(sys.argv[3]):
  mesh = sharding.make_mesh(config.MeshConfig(**sizes))
  found.append(sharding.part_of_batch(mesh))
print(json.dumps(found), file=sys.stderr)
"""
  meshes = json.dumps(
    [
      {"fsdp": 8},
      {"fsdp": 4, "tensor": 2},
      {"tensor": 8},
      {"fsdp": 2, "tensor": 4},
    ]
  )
  port = free_port()
  both = [
    subprocess.Popen(
      [sys.executable, "-c", program, f"127.0.0.1:{port}", str(i), meshes],
      env=training_cases.environment(
        XLA_FLAGS="--xla_force_host_platform_device_count=4"
      ),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  for index, (code, _, err) in enumerate(ends(both)):
    assert code == 0, err
    found = json.loads(err.strip().splitlines()[-1])
    assert found == [[index, 2], [index, 2], [0, 1], [index, 2]]
