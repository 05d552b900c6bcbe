"""Two processes of four devices are one run, as one of eight is."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import training_cases
import two_processes
from two_processes import ends, free_port
from two_processes import start as start_two

LENGTH = (
  "--config.training.steps=100",
  "--config.training.checkpoint_every=60",
  # Rows take over the state of the row before, on whichever device that is.
  "--config.training.state_passing=0.3",
)
EVALUATED = (
  "--config.evaluation.run_after_training=True",
  "--config.evaluation.lengths=2",
  "--config.evaluation.rows=1",
  "--config.evaluation.sample_tokens=4",
)


def losses(workdir):
  return [record["loss"] for record in training_cases.curve(workdir)]


def assert_same_losses(ours, expected):
  """Sums are taken in another order: training lets that grow, slowly.

  After a hundred steps to .3 % where it was most. Another batch would change a
  loss by a tenth.
  """
  np.testing.assert_allclose(ours[:20], expected[:20], rtol=1e-6)
  np.testing.assert_allclose(ours, expected, rtol=1e-2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return training_cases.write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def one_process(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "one"
  code, _, err = training_cases.train(
    config,
    workdir,
    *two_processes.FLAGS,
    *LENGTH,
    XLA_FLAGS="--xla_force_host_platform_device_count=8",
  )
  assert code == 0, err
  return losses(workdir)


@pytest.mark.slow
def test_the_losses_of_one_process_and_one_set_of_files(
  config, one_process, tmp_path
):
  workdir = tmp_path / "two"
  both = start_two(config, workdir, *LENGTH, *EVALUATED)
  (code, out, err), (code_b, out_b, err_b) = ends(both)
  assert (code, code_b) == (0, 0), err + err_b
  assert json.loads((workdir / "eval/results.json").read_text())["step"] == 100
  assert_same_losses(losses(workdir), one_process)
  assert "step 100/100" in out and "step" not in out_b
  assert (workdir / "config.json").exists()


@pytest.mark.slow
def test_a_signal_to_one_stops_both_and_fewer_devices_go_on(
  config, one_process, tmp_path
):
  workdir = tmp_path / "two"
  both = start_two(config, workdir, *LENGTH)
  two_processes.wait_for_step(both, workdir, 1)
  both[1].send_signal(signal.SIGTERM)
  (code, _, err), (code_b, _, err_b) = ends(both)
  assert (code, code_b) == (42, 42), err + err_b
  assert "another process was stopped" in err and "SIGTERM" in err_b
  assert len(losses(workdir)) < 100
  code, _, err = training_cases.train(
    config,
    workdir,
    *two_processes.FLAGS,
    *LENGTH,
    "--config.mesh.replica=1",
    XLA_FLAGS="--xla_force_host_platform_device_count=4",
  )
  assert code == 0, err
  assert_same_losses(losses(workdir), one_process)


@pytest.mark.slow
def test_rows_whose_time_lies_on_both(config, one_process, tmp_path):
  workdir = tmp_path / "two"
  mesh = {"replica": 1, "fsdp": 1, "context": 8}
  flags = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
  with two_processes.running(config, workdir, *LENGTH, *flags) as both:
    two_processes.wait_for_step(both, workdir, 12)
  found = losses(workdir)
  np.testing.assert_allclose(found[:12], one_process[:12], rtol=1e-5)


@pytest.mark.slow
def test_a_process_with_other_code_is_named(config, tmp_path):
  root = tmp_path / "copy"
  shutil.copytree(training_cases.ROOT / "memcomp", root / "memcomp")
  shutil.copy(training_cases.ROOT / "train.py", root)
  with open(root / "memcomp/errors.py", "a") as file:
    file.write("# One line more.\n")
  both = start_two(config, tmp_path / "two", other_root=root)
  for code, _, err in ends(both):
    assert code == 2
    assert "process 1 in its code; here: code" in err
  assert not (tmp_path / "two").exists()


def test_a_mistake_in_one_ends_both(config, tmp_path):
  workdir = tmp_path / "two"
  workdir.mkdir()
  (workdir / "metrics.jsonl").write_text("{}\n")
  both = start_two(config, workdir, *LENGTH)
  for code, _, err in ends(both):
    assert code == 2
    assert "no config.json" in err


def test_parts_of_a_batch():
  """Rows are read once: by each process its own, or by all that share them."""
  program = """
import json, sys
import jax
import numpy as np
from memcomp import config, sharding
from memcomp.training import processes
processes.join(coordinator=sys.argv[1], count=2, index=int(sys.argv[2]))
found = []
for sizes in json.loads(sys.argv[3]):
  mesh = sharding.make_mesh(config.MeshConfig(**sizes))
  found.append(sharding.rows_of_process(mesh, 8).tolist())
# A process's devices need not be neighbours, as on a torus.
mesh = sharding.make_mesh(config.MeshConfig(fsdp=8))
order = mesh.devices.reshape(2, 4).T.reshape(mesh.devices.shape)
mesh = jax.sharding.Mesh(order, mesh.axis_names)
rows = sharding.rows_of_process(mesh, 8)
found.append(rows.tolist())
whole = jax.make_array_from_process_local_data(
  sharding.batch_sharding(mesh), np.tile(rows[:, None], (1, 4))
)
for shard in whole.addressable_shards:
  assert (shard.data == shard.index[0].start).all()
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
    mine = list(range(4 * index, 4 * index + 4))
    apart = list(range(index, 8, 2))
    assert found == [mine, mine, list(range(8)), mine, apart]
