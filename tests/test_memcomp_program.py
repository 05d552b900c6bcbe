"""The program memcomp: its commands, their names and their configs' names."""

import os
import pathlib
import subprocess
import sys

import forks
import pytest

import memcomp
from memcomp import __main__ as program
from memcomp import errors, named_configs

ROOT = pathlib.Path(__file__).parents[1]


def call(monkeypatch, capsys, *arguments):
  """Calls memcomp in this process: (exit code, stdout, stderr)."""
  monkeypatch.setattr(sys, "argv", ["memcomp", *arguments])
  return program.main(), *capsys.readouterr()


def test_help_lists_the_commands(monkeypatch, capsys):
  code, out, err = call(monkeypatch, capsys, "--help")
  assert (code, err) == (0, "")
  for name in program.COMMANDS:
    assert f"\n  {name} " in out
  assert len(out.splitlines()) < 20


def test_version(monkeypatch, capsys):
  expected = (0, f"memcomp {memcomp.__version__}\n", "")
  assert call(monkeypatch, capsys, "--version") == expected


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ([], "no command is given; memcomp --help"),
    (["trian"], "trian: there is no such command; did you mean train?"),
    (["zzz"], "zzz: there is no such command; memcomp --help"),
    (["--config=smoke"], "--config=smoke: there is no such command"),
  ],
)
def test_a_mistake_is_one_line(arguments, said, monkeypatch, capsys):
  code, out, err = call(monkeypatch, capsys, *arguments)
  assert (code, out) == (errors.EXIT_BAD_INPUT, "")
  (line,) = err.splitlines()
  assert line.startswith("error: ") and said in line


def run_program(*arguments, start=("-m", "memcomp"), **options):
  paths = [str(ROOT), str(ROOT / "kernels")]
  return subprocess.run(
    [sys.executable, *start, *arguments],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    capture_output=True,
    text=True,
    **options,
  )


# Each runs in a fork; `test_a_command_starts_by_itself` starts one as users do.
LINES = {name: [name, "--help"] for name in program.COMMANDS} | {
  "mistake": ["chat", "--task=sample"]
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
  """What each command line ends with: [exit code, stdout, stderr]."""
  folder = tmp_path_factory.mktemp("program")
  found = forks.run("memcomp.__main__", folder, commands=list(LINES.values()))
  return dict(zip(LINES, found, strict=True))


@pytest.mark.parametrize("name", program.COMMANDS)
def test_a_command_says_how_it_is_used(name, said):
  code, out, err = said[name]
  assert (code, err) == (0, "")
  assert f"  memcomp {name}" in out
  assert "Exit code" in " ".join(out.split())


def test_chat_has_the_flags_of_chat(said):
  _, out, _ = said["chat"]
  assert "--checkpoint" in out and "--prompt_file" in out
  assert "--lengths" not in out
  code, out, err = said["mistake"]
  assert (code, out) == (errors.EXIT_BAD_INPUT, "")
  assert err.startswith("error: --task")


def test_a_command_starts_by_itself(said):
  done = run_program("train", "--help")
  assert [done.returncode, done.stdout, done.stderr] == said["train"]


def test_train_names_the_configs(said):
  assert ", ".join(named_configs.names()) in said["train"][1]


def test_a_folder_that_was_removed(tmp_path):
  """The shell stays in it; no path of the command is at fault."""
  folder = tmp_path / "gone"
  folder.mkdir()
  remove = (
    "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])"
  )
  command = [sys.executable, "-m", "memcomp", "train"]
  done = run_program(cwd=folder, start=["-c", remove, *command])
  assert done.returncode == errors.EXIT_BAD_INPUT
  assert done.stderr == (
    "error: the current folder was removed; change into one that exists\n"
  )


@pytest.mark.parametrize(
  ("given", "argument"),
  [
    ("smoke", ""),
    ("lm:lattice-125m", ":lattice-125m"),
    ("run:a/b.c", ":a/b.c"),
  ],
)
def test_a_config_by_name(given, argument):
  name = given.partition(":")[0]
  assert (
    named_configs.path_of(given) == f"{ROOT / 'configs' / name}.py{argument}"
  )


@pytest.mark.parametrize(
  "path", ["configs/smoke.py", "./smoke", "smoke.py:x", "/a/smoke", "folder/x"]
)
def test_a_path_of_a_config_stays(path):
  assert named_configs.path_of(path) == path


def test_a_file_without_an_ending_is_no_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine").touch()
  assert named_configs.path_of("mine:a") == "mine:a"


@pytest.mark.parametrize("name", ["smok", "zzz:a", ""])
def test_an_unknown_name_is_told_the_names(name):
  with pytest.raises(errors.UserError) as found:
    named_configs.path_of(name)
  assert ", ".join(named_configs.names()) in str(found.value)
  assert ("did you mean smoke?" in str(found.value)) == (name == "smok")
