import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from memcomp import doctor, layers
from memcomp.layers import registry
from memcomp_kernels import dispatch
from memcomp_kernels.testing import memories, memory

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def only(monkeypatch):
  """Runs the doctor with one of its checks: name, flags -> exit code."""

  def run(name: str, *flags: str) -> int:
    monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name]})
    return doctor.main(list(flags))

  return run


def install(monkeypatch, **versions):
  real = importlib.metadata.version

  def version(name):
    found = versions.get(name, "as installed")
    if found is None:
      raise importlib.metadata.PackageNotFoundError(name)
    return real(name) if found == "as installed" else found

  monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.slow  # CI runs the doctor itself, without --all.
def test_this_machine_is_in_order():
  paths = [
    *filter(None, [os.environ.get("PYTHONPATH")]),
    ROOT,
    ROOT / "kernels",
  ]
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(map(str, paths)),
    "JAX_PLATFORMS": "cpu",
  }
  # Set for the tests: eight devices, no optimisations.
  for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
    environment.pop(name, None)
  done = subprocess.run(
    [sys.executable, "-m", "memcomp", "doctor", "--all"],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stderr == ""
  lines = done.stdout.splitlines()
  assert lines[-1] == "OK: everything is in order"
  assert f"    jax {jax.__version__}" in lines
  assert "    trellis: xla_chunked (fastest form on cpu)" in lines
  tested = [x for x in lines if "xla_chunked against reference" in x]
  assert len(tested) == len(memories.MEMORIES)
  assert any("1 x cpu" in line for line in lines)


@pytest.mark.parametrize("version", ["0.13.0", "0.11.1", "0.4.38"])
def test_unsupported_jax(version, only, monkeypatch, capsys):
  install(monkeypatch, jax=version)
  assert only("versions") == 1
  out = capsys.readouterr().out
  assert (
    f"  ! jax {version} does not satisfy >=0.11.2,<0.13; pip install" in out
  )
  assert "\n1 problem:\n  - jax" in out


@pytest.mark.parametrize("version", ["0.11.2", "0.12.0.1", "0.12.5"])
def test_supported_jax(version, only, monkeypatch):
  install(monkeypatch, jax=version)
  assert only("versions") == 0


def test_missing_libraries(only, monkeypatch, capsys):
  install(monkeypatch, grain=None, tensorboardX=None)
  assert only("versions") == 1
  out = capsys.readouterr().out
  assert "! grain is not installed; pip install 'grain>=" in out
  assert "    tensorboardX not installed (optional: extra tb)" in out
  assert "\n1 problem:" in out


def test_requirements_of_an_installed_package_are_those_of_the_checkout(
  monkeypatch, tmp_path
):
  expected = doctor.requirements()
  assert expected[1]["jax"] == ">=0.11.2,<0.13"
  assert ("plot", "matplotlib") in expected[2] or (
    "test",
    "matplotlib",
  ) in expected[2]
  lines = [f"{name}{wanted}" for name, wanted in expected[1].items()]
  lines += [f'{n}{w}; extra == "{e}"' for (e, n), w in expected[2].items()]
  lines += ['jax[tpu]<0.13,>=0.11.2; extra == "tpu"']
  monkeypatch.setattr(doctor, "__file__", str(tmp_path / "memcomp/doctor.py"))
  monkeypatch.setattr(
    importlib.metadata, "metadata", lambda name: {"Requires-Python": ">=3.12"}
  )
  monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
  assert doctor.requirements() == expected


@pytest.mark.parametrize(
  ("version", "wanted", "expected"),
  [
    ("3.12.1", ">=3.12", True),
    ("3.11.9", ">=3.12", False),
    ("0.12.0.1", ">=0.11.2,<0.13", True),
    ("0.13", ">=0.11.2, <0.13", False),
    ("0.13.0.dev20260101", "<0.13", False),
    ("2.10", ">=2.9", True),
    ("1.0+cuda", "==1.0.0", True),
    ("1.0", "", True),
  ],
)
def test_fits(version, wanted, expected):
  assert doctor.fits(version, wanted) is expected


class Inputs(NamedTuple):
  value: jax.Array


def toy_memory(spoil=lambda x: x, name="toy"):
  """A running sum in two forms: compiles in no time, unlike a real memory."""

  class Op:
    implementations = dispatch.Implementations(
      "toy", reference=None, xla_chunked=None
    )

    @staticmethod
    def chunk(state, inputs, *, spec, implementation):
      value = inputs.value
      if implementation == "xla_chunked":
        value = spoil(value)
      y = state[:, None] + jnp.cumsum(value, axis=1)
      return y[:, -1], y

  def make_inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
    return Inputs(jax.random.normal(key, (batch, time, heads, value_dim)))

  def make_state(key, spec, *, batch, heads, key_dim, value_dim):
    return jax.random.normal(key, (batch, heads, value_dim))

  return memory.Memory(
    name,
    Op,
    specs={"only": None},
    typical=("only",),
    make_inputs=make_inputs,
    make_state=make_state,
    edges=lambda inputs: {},
  )


# A wrong value, a right value with a wrong gradient, and nan in the value alone.
SPOILT = {
  "value": lambda x: 1.01 * x,
  "gradient": jax.lax.stop_gradient,
  "nan": lambda x: x + jax.lax.stop_gradient(x * float("nan")),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_failing_self_test(kind, only, monkeypatch, capsys):
  toy = toy_memory(SPOILT[kind])
  monkeypatch.setattr(memories, "MEMORIES", {"toy": toy})
  assert only("self-test", "--all") == 1
  out = capsys.readouterr().out
  assert "! toy: xla_chunked against reference" in out
  assert "results on this machine are wrong" in out


def test_sound_self_test(only, monkeypatch, capsys):
  monkeypatch.setattr(memories, "MEMORIES", {"toy": toy_memory()})
  assert only("self-test", "--all") == 0
  assert "    toy: xla_chunked against reference" in capsys.readouterr().out


def test_few_memories_are_tested_unless_all_are_asked_for(
  only, monkeypatch, capsys
):
  assert set(doctor.QUICK) < set(memories.MEMORIES)
  known = {name: toy_memory(name=name) for name in (*doctor.QUICK, "slow")}
  monkeypatch.setattr(memories, "MEMORIES", known)
  assert only("self-test") == 0
  out = capsys.readouterr().out
  for name in doctor.QUICK:
    assert f"    {name}: xla_chunked against reference" in out
  assert "slow: xla_chunked" not in out
  assert "    not tested without --all: slow\n" in out
  assert only("self-test", "--all") == 0
  out = capsys.readouterr().out
  assert "    slow: xla_chunked against reference" in out
  assert "not tested" not in out


@pytest.mark.parametrize(
  ("refused", "said"),
  [
    ({"float32", "bfloat16"}, "library_tpu not tested: too small a call"),
    ({"float32"}, "library_tpu against reference, values and gradients: "),
  ],
)
def test_a_kernel_that_cannot_do_the_self_test(
  refused, said, only, monkeypatch, capsys
):
  toy = toy_memory()
  chunk = toy.op.chunk

  def refusing(state, inputs, *, implementation, spec):
    if implementation == "library_tpu" and str(inputs.value.dtype) in refused:
      raise NotImplementedError("too small a call")
    return chunk(state, inputs, implementation=implementation, spec=spec)

  monkeypatch.setattr(toy.op, "chunk", staticmethod(refusing))
  toy.op.implementations.functions["library_tpu"] = None
  monkeypatch.setattr(dispatch, "current_platform", lambda: "tpu")
  monkeypatch.setattr(memories, "MEMORIES", {"toy": toy})
  assert only("self-test", "--all") == 0
  out = capsys.readouterr().out
  assert f"    toy: {said}" in out
  assert (" in bfloat16 (" in out) == ("bfloat16" not in refused)
  assert "    toy: xla_chunked against reference" in out


@pytest.mark.parametrize(
  ("platform", "expected"),
  [
    ("tpu", "library_tpu (fastest form on tpu, for the calls that it can do)"),
    ("gpu", "library_gpu (fastest form on gpu, for the calls that it can do)"),
    ("cpu", "xla_chunked (fastest form on cpu)"),
  ],
)
def test_libraries_kernels_have_a_line(
  platform, expected, only, monkeypatch, capsys
):
  monkeypatch.setattr(dispatch, "current_platform", lambda: platform)
  assert only("implementations") == 0
  out = capsys.readouterr().out
  assert f"    softmax_attention: {expected}" in out
  if platform != "cpu":
    assert (
      f"rwkv7: xla_chunked (no mosaic_{platform} kernel for rwkv7 yet)" in out
    )


def test_a_layer_of_this_machine(only, capsys):
  assert only("layer") == 0
  assert "built and called" in capsys.readouterr().out


def test_a_layer_of_nan(only, monkeypatch, capsys):
  class Trellis:
    def __init__(self, d_model, *, heads, rngs):
      pass

    def __call__(self, x):
      return x * jnp.nan

  monkeypatch.setattr(layers, "Trellis", Trellis)
  assert only("layer") == 1
  assert "values are not finite; results on this" in capsys.readouterr().out


def test_options_of_the_compiler_are_put_back(only, monkeypatch):
  name, meanwhile = "jax_disable_most_optimizations", []

  def layer(*sizes, **options):
    meanwhile.append(jax.config.read(name))
    return lambda x: x

  monkeypatch.setattr(layers, "Trellis", layer)
  before = jax.config.read(name)
  jax.config.update(name, False)
  try:
    assert only("layer") == 0
    assert meanwhile == [True] and not jax.config.read(name)
  finally:
    jax.config.update(name, before)


def test_devices_that_fail(only, monkeypatch, capsys):
  def devices():
    raise RuntimeError("Unable to initialize backend 'tpu'\nmore")

  monkeypatch.setattr(jax, "devices", devices)
  monkeypatch.setenv("JAX_PLATFORMS", "tpu")
  assert only("devices") == 1
  expected = (
    "! devices: JAX_PLATFORMS=tpu: JAX has no such device (Unable to initialize"
    " backend 'tpu'); unset JAX_PLATFORMS"
  )
  assert expected in capsys.readouterr().out


def test_temporary_folder_that_cannot_be_written(only, monkeypatch, capsys):
  monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
  assert only("machine") == 1
  assert "cannot write a temporary file" in capsys.readouterr().out


def test_every_mixer_has_a_line(only, capsys):
  assert only("implementations") == 0
  out = capsys.readouterr().out
  for name in registry.MIXERS:
    assert f"    {name}: " in out


def test_a_check_that_raises_is_a_problem(only, monkeypatch, capsys):
  monkeypatch.setitem(registry.MIXERS, "nonsense", object)
  assert only("implementations") == 1
  out = capsys.readouterr().out
  assert "1 problem:\n  - implementations: AttributeError" in out


def test_all_checks_run_after_a_failure(monkeypatch, capsys):
  def fail():
    raise RuntimeError("first")
    yield

  checks = {"one": fail, "two": lambda: [(True, "second ran")]}
  monkeypatch.setattr(doctor, "CHECKS", checks)
  assert doctor.main([]) == 1
  out = capsys.readouterr().out
  assert (
    "second ran" in out and "1 problem:\n  - one: RuntimeError: first" in out
  )
